"""How long things take: medians of repeats, each in a box of time, and copies that go on beside."""

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

_LEAST = 3
_MANY_BOXES = 6
_IN_FLIGHT = 3
_ENOUGH = 5


@dataclass(frozen=True)
class Effort:
    """How much to spend on a measurement; tests take less."""

    seconds: float = 0.05
    """The box of time for one figure."""
    slow: float = 0.3
    """Seconds that a point of a curve may take before the curve is cut short."""
    cold: int | None = None
    """Bytes to go round in, so that no cache holds what is next; None: by the caches of here."""
    largest_copy: int = 64 << 20
    largest_matrix: int = 8192
    disk: int = 1 << 30
    """Bytes written to a disk and read again, at most."""


def always() -> bool:
    return True


def repeat(
    job: Callable[[], _Result], box: float, enough: Callable[[], bool] = always
) -> list[_Result]:
    """What `job` returns, again and again: until the box is over and `enough` says so, and at least
    three times unless that takes many boxes."""
    results: list[_Result] = []
    began = time.perf_counter()
    while True:
        results.append(job())
        boxes = (time.perf_counter() - began) / box
        if boxes >= 1 and enough() and (len(results) >= _LEAST or boxes >= _MANY_BOXES):
            return results


def seconds_of(
    job: Callable[[], object],
    box: float,
    enough: Callable[[], bool] = always,
    warm_up: bool = True,
) -> float:
    """The median time of a call. The first one starts threads and compiles kernels: not counted,
    if there is to be a `warm_up`."""

    def timed() -> float:
        began = time.perf_counter()
        job()
        return time.perf_counter() - began

    if warm_up:
        job()
    return statistics.median(repeat(timed, box, enough))


class Flow:
    """Copies on a lane for as long as the block lasts, some always in flight, as the loader makes
    them: what runs in the block runs beside them."""

    def __init__(self, lane: CopyStream, copies: Copies) -> None:
        self._lane = lane
        self._copies = copies
        self._ends: list[float] = []
        self._stop = False

    def __enter__(self) -> "Flow":
        pool = ThreadPoolExecutor(1, thread_name_prefix="overspill-probe")
        self._running: Future[None] = pool.submit(self._run)
        pool.shutdown(wait=False)  # once it has done this
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._running.result()  # also raises what went wrong there

    def enough(self) -> bool:
        """Whether enough copies have ended to tell their time, or none will."""
        return len(self._ends) >= _ENOUGH or self._running.done()

    @property
    def seconds(self) -> float:
        """Time of one copy, from the end of one to the end of the next."""
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
            for mark in marks:  # the memory may go when the block has ended
                mark.wait()


def flow_seconds(flow: Flow, box: float) -> float:
    """Time of one of its copies with nothing else going on."""
    with flow:
        repeat(_rest, box, flow.enough)
    return flow.seconds


def both_seconds(one: Flow, other: Flow, box: float) -> tuple[float, float]:
    """The same for two that go on together."""
    with one, other:
        repeat(_rest, box, lambda: one.enough() and other.enough())
    return one.seconds, other.seconds


def _rest() -> None:
    time.sleep(0.001)


class Steps:
    """Tells `progress` which of so many measurements has begun."""

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
