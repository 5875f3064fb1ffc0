"""Timing: boxes of time, repeats, and copies that go on beside."""

import time

import pytest
import torch

from overspill.probe.clock import Flow, Steps, both_seconds, flow_seconds, repeat, seconds_of
from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import Lane

CPU = torch.device("cpu")


def test_a_quick_job_is_repeated_until_the_box_is_over() -> None:
    began = time.perf_counter()
    results = repeat(lambda: 1, box=0.02)
    assert 0.02 <= time.perf_counter() - began < 1
    assert len(results) > 100


def test_a_job_longer_than_the_box_is_still_repeated_three_times() -> None:
    assert len(repeat(lambda: time.sleep(0.01), box=0.005)) == 3


def test_a_very_long_job_is_not_repeated() -> None:
    assert len(repeat(lambda: time.sleep(0.05), box=0.001)) == 1


def test_it_goes_on_until_it_is_told_that_it_is_enough() -> None:
    calls: list[int] = []
    repeat(lambda: calls.append(1), box=1e-6, enough=lambda: len(calls) >= 10)
    assert len(calls) == 10


def test_the_median_is_that_of_the_calls_after_the_first() -> None:
    naps = iter([0.2, *[0.005] * 100])
    assert 0.005 <= seconds_of(lambda: time.sleep(next(naps)), box=0.02) < 0.1


def _flow(wait: float, failing: bool = False) -> Flow:
    def inject(row: str) -> None:
        time.sleep(wait)
        if failing:
            raise RuntimeError("the link is broken")

    lane = Lane("upload", CPU, Recorder(), inject)
    one, other = torch.zeros(2, 16)
    return Flow(lane, lambda n: [(one, other)])


def test_a_flow_tells_the_time_of_one_copy() -> None:
    assert 0.004 <= flow_seconds(_flow(0.004), box=0.01) < 0.05


def test_two_flows_go_on_together() -> None:
    began = time.perf_counter()
    one, other = both_seconds(_flow(0.01), _flow(0.01), box=0.01)
    assert min(one, other) >= 0.01
    assert time.perf_counter() - began < 0.01 * 2 * 7  # one after the other it would be more


def test_a_broken_flow_says_so_and_nobody_waits_for_it() -> None:
    with pytest.raises(RuntimeError, match="the link is broken"):
        flow_seconds(_flow(0, failing=True), box=0.01)


def test_steps_are_counted_and_end_with_all_of_them() -> None:
    told: list[tuple[str, int, int]] = []
    steps = Steps(lambda *what: told.append(what), 2)
    steps.begin("a")
    steps.begin("b")
    steps.end()
    assert told == [("measuring a", 0, 2), ("measuring b", 1, 2), ("measured", 2, 2)]
