"""Lanes and marks where there is no GPU: a copy is done when the call returns."""

import torch

from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import PASSED, Lane, compute_mark, compute_waits
from tests.transfer.fakes import CPU


def test_a_copy_on_the_cpu_is_done_on_return_and_is_counted() -> None:
    recorder, kinds = Recorder(), []
    lane = Lane("download", CPU, recorder, kinds.append)
    pairs = [(torch.zeros(4), torch.ones(4)), (torch.zeros(2), torch.full((2,), 5.0))]
    mark = lane.copy(pairs, "expert 0.0", after=[PASSED])
    assert mark.done()
    mark.wait()
    assert all(torch.equal(into, source) for into, source in pairs)
    assert recorder.counters() == {"download": 24}
    assert kinds == ["download"], "tests can delay every copy"


def test_what_is_injected_comes_before_the_copy() -> None:
    into, source, seen = torch.zeros(3), torch.ones(3), []
    lane = Lane("upload", CPU, Recorder(), lambda _: seen.append(into.sum().item()))
    lane.copy([(into, source)], "expert 0.0")
    assert seen == [0.0]


def test_the_cpu_has_always_passed_its_marks() -> None:
    mark = compute_mark(CPU)
    assert mark.done()
    compute_waits(CPU, mark)
