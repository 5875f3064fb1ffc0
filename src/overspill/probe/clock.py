"""Timing: medians of repeated calls within a time limit, and copies in the background."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from overspill.tiers.slab import Progress
from overspill.transfer.streams import CopyStream, StreamEvent

_Result = TypeVar("_Result")
Copies = Callable[[int], Sequence[tuple[Tensor, Tensor]]]
"""The (destination, source) pairs of the n-th copy."""

_MIN_REPEATS = 3
_MAX_LIMITS = 6  # time limits after which fewer repeats are enough
_IN_FLIGHT = 3
_MIN_COPIES = 5


@dataclass(frozen=True)
class Effort:
    """Limits on the time and memory of a measurement; tests use lower ones."""

    seconds: float = 0.05
    """Time limit of one measurement, in seconds."""
    slow: float = 0.3
    """Seconds of one point after which a curve is cut short."""
    cold: int | None = None
    """Bytes to cycle through, so that no cache holds the next expert; None: by the cache sizes."""
    copy: int = 64 << 20
    """Bytes of one copy over the link."""


def always() -> bool:
    return True


def repeat(
    job: Callable[[], _Result],
    limit: float,
    enough: Callable[[], bool] = always,
    now: Callable[[], float] = time.perf_counter,
) -> list[_Result]:
    """Calls `job` until the time limit is over and `enough()` holds, and at least three times
    unless that takes much longer than the limit. Returns the results."""
    results: list[_Result] = []
    began = now()
    while True:
        results.append(job())
        limits = (now() - began) / limit
        if limits >= 1 and enough() and (len(results) >= _MIN_REPEATS or limits >= _MAX_LIMITS):
            return results


def seconds_of(
    job: Callable[[], object],
    limit: float,
    enough: Callable[[], bool] = always,
    warm_up: bool = True,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """The median time of a call; with `warm_up` after one call that is not counted, since it may
    start threads and compile kernels."""

    def timed() -> float:
        began = now()
        job()
        return now() - began

    if warm_up:
        job()
    return statistics.median(repeat(timed, limit, enough, now))


class BackgroundCopies:
    """Copies on a stream while the block runs, several in flight, as the uploader issues them."""

    def __init__(self, lane: CopyStream, copies: Copies) -> None:
        self._lane = lane
        self._copies = copies
        self._ends: list[float] = []
        self._stop = False

    def __enter__(self) -> "BackgroundCopies":
        pool = ThreadPoolExecutor(1, thread_name_prefix="overspill-probe")
        self._running: Future[None] = pool.submit(self._run)
        pool.shutdown(wait=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._running.result()  # raises the errors of the thread

    def enough(self) -> bool:
        """Whether enough copies have ended to measure their time, or none will."""
        return len(self._ends) >= _MIN_COPIES or self._running.done()

    @property
    def seconds(self) -> float:
        """Time between the ends of two copies."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def _run(self) -> None:
        marks: deque[StreamEvent] = deque()
        number = 0
        try:
            while not self._stop:
                marks.append(self._lane.copy(self._copies(number), "probe"))
                number += 1
                if len(marks) == _IN_FLIGHT:
                    marks.popleft().wait()
                    self._ends.append(time.perf_counter())
        finally:
            for mark in marks:  # the memory may be freed after the block
                mark.wait()


def copy_seconds(limit: float, copies: BackgroundCopies) -> float:
    """Time of a copy when nothing else runs."""
    with copies:
        repeat(lambda: time.sleep(0.001), limit, copies.enough)
    return copies.seconds


class Steps:
    """Counter that reports each of `total` measurements to `progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def begin(self, what: str) -> None:
        if self._progress is not None:
            self._progress(f"measuring {what}", self._done, self._total)
        self._done += 1

    def end(self) -> None:
        assert self._done == self._total
        if self._progress is not None:
            self._progress("measured", self._total, self._total)
