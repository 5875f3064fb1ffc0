"""Deferred Ctrl-C, and a condition variable that Ctrl-C leaves intact."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class DeferredInterrupt:
    """Context in which the first Ctrl-C takes effect in `check` or at the end, the second at once.
    Does nothing in threads other than the main one, or if the caller has a signal handler of its
    own."""

    def __init__(self) -> None:
        self._requested = False
        self._installed = False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._installed = True
            signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True

    def check(self) -> None:
        """Raises KeyboardInterrupt after a Ctrl-C; in any thread."""
        if self._requested:
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()


class Condition:
    """Condition variable whose lock is still held if Ctrl-C interrupts `wait`, at any instruction.
    (The one of the standard library may lose the lock.)

    Python looks for signals after a call, never within a call of C code: the lock is released and
    the fact noted in one such call. An interrupt may still come between a change and its
    notification, so a `wait` has a time limit, after which its caller must look again.
    """

    LIMIT = 1.0
    """Seconds after which a `wait` ends without a notification."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock: Any = lock  # its methods for condition variables are not declared
        self._waiting: list[threading.Lock] = []

    def wait(self, limit: float = LIMIT) -> None:
        """Release the lock until a notification, or for `limit` seconds. The caller holds the
        lock."""
        notified = threading.Lock()
        notified.acquire()
        self._waiting.append(notified)
        released: list[Any] = []
        try:
            released.extend(map(type(self._lock)._release_save, (self._lock,)))
            notified.acquire(timeout=limit)
        finally:
            if released:
                self._lock._acquire_restore(released[0])
        if notified in self._waiting:
            self._waiting.remove(notified)

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for a notification."""
        return bool(self._waiting)

    def notify(self) -> None:
        """Wake the thread that has waited longest. The caller holds the lock."""
        if self._waiting:
            self._waiting.pop(0).release()

    def notify_all(self) -> None:
        """Wake every waiting thread. The caller holds the lock."""
        waiting, self._waiting = self._waiting, []
        for notified in waiting:
            notified.release()
