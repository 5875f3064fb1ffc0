"""The lock shared by the main thread and the worker threads, and how they wait for each other."""

import logging
import threading
from collections.abc import Callable

from overspill.core.errors import EngineError, OverspillError

WATCHDOG_SECONDS = 60.0
_SLICES = 20  # a process that was suspended loses one of them, not the whole time
_log = logging.getLogger("overspill")


class WorkerSync:
    """One lock with three conditions, so that only threads that can go on are woken, and the first
    failure of a worker thread."""

    def __init__(self, watchdog_seconds: float = WATCHDOG_SECONDS) -> None:
        self.lock = threading.RLock()
        self._main = threading.Condition(self.lock)
        self._uploader = threading.Condition(self.lock)
        self._updates = threading.Condition(self.lock)
        self._changes = 0  # notifications so far; the watchdog takes them for progress
        self._watchdog_seconds = watchdog_seconds
        self.error: BaseException | None = None

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Blocks until `ready()`, which is called under the lock. Raises if a worker thread has
        failed, or if nothing has changed for a minute: `what` says what was waited for. A disk that
        takes longer is only reported."""
        with self.lock:
            seen, slices = self._changes, 0
            while slices < _SLICES:
                done = self._main.wait_for(
                    lambda: self.error is not None or ready(), self._watchdog_seconds / _SLICES
                )
                self.raise_error()
                if done:
                    return
                seen, slices = self._changes, slices + 1 if seen == self._changes else 0
                if slices == _SLICES and self.disk_busy():
                    _log.warning("no disk transfer has ended for %.0f s", self._watchdog_seconds)
                    slices = 0
        threads = sorted(t.name for t in threading.enumerate() if "overspill" in t.name)
        raise EngineError(
            f"no progress for {self._watchdog_seconds:.0f} s while waiting for {what}; "
            f"running threads: {', '.join(threads) or 'none'}. Please report this as a bug"
        )

    def disk_busy(self) -> bool:
        """Under the lock: whether a disk transfer is running."""
        return False

    def wait_uploader(self) -> None:
        """Called by the uploader's thread under the lock: sleeps until an entry has changed."""
        self._uploader.wait()

    def wait_updates(self) -> None:
        """Called by an update thread under the lock: sleeps until there may be work."""
        self._updates.wait()

    def wake_main(self) -> None:
        with self.lock:
            self._changes += 1
            self._main.notify_all()

    def wake_uploader(self) -> None:
        with self.lock:
            self._uploader.notify_all()

    def wake_updates(self) -> None:
        with self.lock:
            self._updates.notify_all()

    def raise_error(self) -> None:
        if self.error is not None:
            if isinstance(self.error, OverspillError):
                raise self.error
            raise EngineError(
                f"a worker thread failed: {self.error!r}; the last checkpoint is safe"
            ) from self.error

    def fail(self, error: BaseException) -> None:
        """Records the first failure and wakes all threads."""
        with self.lock:
            if self.error is None:
                self.error = error
            self.wake_all()

    def wake_all(self) -> None:
        self.wake_main()
        self.wake_uploader()
        self.wake_updates()
