"""Ctrl-C at a chosen instruction: Python looks for signals after calls, so an interrupt comes after
one of them. Counting calls makes that repeatable, where a timer would hit the long ones only."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import overspill

_SOURCE = str(Path(overspill.__file__).parent)
_LIBRARY = str(Path(threading.__file__).parent)


class _Counter:
    """Counts calls of Overspill and, within them, of the standard library; raises at one."""

    def __init__(self, at: int | None) -> None:
        self.calls = 0
        self._at = at

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event not in ("call", "c_return") or not _is_ours(frame):
            return
        self.calls += 1
        if self.calls == self._at:
            raise KeyboardInterrupt


def _is_ours(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        if "site-packages" in frame.f_code.co_filename:
            return frame.f_code.co_filename.startswith(_SOURCE)
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_SOURCE)


def _profiled(job: Callable[[], object], counter: _Counter) -> None:
    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        job()
    finally:
        sys.setprofile(before)


def calls_of(job: Callable[[], object]) -> int:
    """How many calls of Overspill `job` makes in this thread."""
    counter = _Counter(None)
    _profiled(job, counter)
    return counter.calls


def interrupted(job: Callable[[], object], at: int) -> bool:
    """Runs `job` and interrupts it after its call number `at`. Whether it was interrupted: there
    may be fewer calls, and an interrupt of a finalizer is ignored."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        _profiled(job, _Counter(at))
    except KeyboardInterrupt:
        return True
    finally:
        if threading.current_thread() is threading.main_thread():
            # not a signal, so DeferredInterrupt did not defer it, and may not have ended
            signal.signal(signal.SIGINT, handler)
    return False


def spread(calls: int, count: int) -> Iterator[int]:
    """`count` of the numbers 1 to `calls`, evenly spread."""
    return (1 + calls * (2 * number + 1) // (2 * count) for number in range(count))
