"""Copy streams and events without a GPU: a copy has ended when the call returns."""

import threading
import time

import torch

from overspill.trace.recorder import Recorder
from overspill.transfer.streams import (
    COMPLETED,
    CopyStream,
    Timestamp,
    record_event,
    to_host,
    wait_event,
)
from tests.fuzz.late import LateStream
from tests.transfer.fakes import CPU


def test_a_copy_on_the_cpu_has_ended_on_return_and_is_counted() -> None:
    recorder, kinds = Recorder(), []
    stream = CopyStream("download", CPU, recorder, kinds.append)
    pairs = [(torch.zeros(4), torch.ones(4)), (torch.zeros(2), torch.full((2,), 5.0))]
    event = stream.copy(pairs, "expert 0.0", after=[COMPLETED])
    assert event.done()
    event.wait()
    assert all(torch.equal(destination, source) for destination, source in pairs)
    assert recorder.counters() == {"download": 24}
    assert kinds == ["download"], "tests can delay every copy"


def test_fault_injection_runs_before_the_copy() -> None:
    destination, source, seen = torch.zeros(3), torch.ones(3), []
    stream = CopyStream("upload", CPU, Recorder(), lambda _: seen.append(destination.sum().item()))
    stream.copy([(destination, source)], "expert 0.0")
    assert seen == [0.0]


def test_events_of_the_cpu_have_always_completed() -> None:
    event = record_event(CPU)
    assert event.done()
    wait_event(CPU, event)


def test_a_tensor_of_the_cpu_is_on_the_host_already() -> None:
    tensor = torch.ones(2)
    assert to_host(tensor) is tensor


def test_timestamps_of_the_cpu_are_seconds_apart() -> None:
    began = time.perf_counter()
    first, second = Timestamp(CPU), Timestamp(CPU)
    assert 0 <= first.seconds_until(second) <= time.perf_counter() - began


def test_deferred_copies_end_later_and_in_order() -> None:
    late = LateStream("upload", seed=1, longest=1e-3)
    stream = CopyStream("upload", CPU, Recorder(), lambda kind: late.defer)
    begin, memory = threading.Event(), torch.zeros(8)

    def wait() -> None:
        begin.wait()

    try:
        late.defer(wait)
        ends = [stream.copy([(memory, torch.full((8,), n))], "copy") for n in (1.0, 2.0, 3.0)]
        assert not any(end.done() for end in ends)
        assert memory.sum() == 0
        begin.set()
        wait_event(CPU, ends[1])
        assert ends[0].done()
        assert memory[0] >= 2
        stream.synchronize()
        assert ends[2].done()
        assert memory[0] == 3
    finally:
        begin.set()
        late.close()
