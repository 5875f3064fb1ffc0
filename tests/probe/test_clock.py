"""Timing: repeats within a time limit, and copies that go on beside."""

import time

import pytest
import torch

from overspill.probe.clock import BackgroundCopies, Steps, copy_seconds, repeat, seconds_of
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import CopyStream
from tests.clock import Clock

CPU = torch.device("cpu")


def _repeats(job_seconds: float, limit: float) -> int:
    """How often a job is called by a clock that only the job moves on."""
    clock = Clock()

    def job() -> None:
        clock.seconds += job_seconds

    return len(repeat(job, limit, now=clock))


def test_a_quick_job_is_repeated_until_the_limit_is_over() -> None:
    assert _repeats(1, limit=128) == 128


def test_a_job_longer_than_the_limit_is_still_repeated_three_times() -> None:
    assert _repeats(2, limit=1) == 3


def test_a_very_long_job_is_not_repeated() -> None:
    assert _repeats(50, limit=1) == 1


def test_it_goes_on_until_it_is_told_that_it_is_enough() -> None:
    calls: list[int] = []
    repeat(lambda: calls.append(1), limit=1e-6, enough=lambda: len(calls) >= 10)
    assert len(calls) == 10


def test_the_median_is_that_of_the_calls_after_the_first() -> None:
    clock, seconds = Clock(), iter([200, 5, 6, 40, 5, 7])

    def job() -> None:
        clock.seconds += next(seconds)

    assert seconds_of(job, limit=60, now=clock) == 6


def _copies(wait: float, failing: bool = False) -> BackgroundCopies:
    def inject(row: str) -> None:
        time.sleep(wait)
        if failing:
            raise RuntimeError("the link is broken")

    lane = CopyStream("upload", CPU, Recorder(), inject)
    one, other = torch.zeros(2, 16)
    return BackgroundCopies(lane, lambda n: [(one, other)])


def test_the_time_of_a_copy_is_measured() -> None:
    began = time.perf_counter()
    seconds = copy_seconds(0.01, _copies(0.004))
    assert 0.004 <= seconds <= (time.perf_counter() - began) / 4, "of five copies or more"


def test_an_error_of_a_copy_is_raised() -> None:
    with pytest.raises(RuntimeError, match="the link is broken"):
        copy_seconds(0.01, _copies(0, failing=True))


def test_steps_are_counted_and_end_with_all_of_them() -> None:
    told: list[tuple[str, int, int]] = []
    steps = Steps(lambda *what: told.append(what), 2)
    steps.begin("a")
    steps.begin("b")
    steps.end()
    assert told == [("measuring a", 0, 2), ("measuring b", 1, 2), ("measured", 2, 2)]
