"""The lock shared by the main thread and the worker threads, and their waits for each other."""

import logging
import threading
import time
from collections.abc import Callable

from overspill.core.errors import EngineError, OverspillError
from overspill.core.interrupt import Condition
from overspill.core.lifetime import store_locks

WATCHDOG_SECONDS = 60.0
_POLL_SECONDS = 5e-4  # where another process changes what is waited for
_SLICES = 20  # a process that was suspended loses one of them, not the whole time
_PATIENCE = 10  # how much longer a busy device may take: it may as well wait for a lost signal
_log = logging.getLogger("overspill")


class Watchdog:
    """One wait of a thread. Raises if it makes no progress: then a signal was lost. A slow disk and
    a device that computes are only reported."""

    def __init__(self, sync: "WorkerSync", what: str, seconds: float) -> None:
        self._sync = sync
        self._what = what
        self._limit = seconds
        self.interval = seconds / _SLICES
        self._last = sync.now()
        self._seen: object = None
        self._waited = 0.0
        self._reports = 0

    def check(self, progress: object) -> None:
        """Raise if `progress` has been the same for too long. Called under the lock, at least every
        `interval`."""
        now = self._sync.now()
        passed, self._last = min(now - self._last, self.interval), now
        if progress != self._seen:
            self._seen, self._waited, self._reports = progress, 0.0, 0
            return
        self._waited += passed
        if self._waited < self._limit:
            return
        self._waited, self._reports = 0.0, self._reports + 1
        seconds = self._reports * self._limit
        if self._sync.disk_busy():
            _log.warning("no disk transfer has ended for %.0f s", seconds)
        elif self._sync.device_busy() and self._reports < _PATIENCE:
            _log.warning("the device has computed for %.0f s; waiting for %s", seconds, self._what)
        else:
            threads = sorted(t.name for t in threading.enumerate() if "overspill" in t.name)
            raise EngineError(
                f"no progress for {seconds:.0f} s while waiting for {self._what}; "
                f"running threads: {', '.join(threads) or 'none'}. Please report this as a bug"
            )


class WorkerSync:
    """One lock with three conditions, so that only threads that can go on are woken, and the first
    failure of a worker thread."""

    def __init__(
        self,
        watchdog_seconds: float = WATCHDOG_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is the clock of the watchdogs, in seconds."""
        self.now = now
        self.lock = threading.RLock()
        store_locks.add(self.lock)
        self._main = Condition(self.lock)
        self._uploader = Condition(self.lock)
        self._updates = Condition(self.lock)
        self._changes = 0  # notifications so far; the watchdog takes them for progress
        self._watchdog_seconds = watchdog_seconds
        self.error: BaseException | None = None
        self.device_busy: Callable[[], bool] = lambda: False
        """Whether the compute device has work that has not ended."""
        self.disk_busy: Callable[[], bool] = lambda: False
        """Whether a disk transfer is running. Called under the lock."""
        self.remote_progress: Callable[[], int] = lambda: 0
        """A number that changes when another rank makes progress."""

    def watchdog(self, what: str) -> Watchdog:
        """Return the watchdog of one wait; `what` names the awaited event and the thread that
        should signal it."""
        return Watchdog(self, what, self._watchdog_seconds)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Block until `ready()`, which is called under the lock. Raises if a worker thread has
        failed, or if nothing has changed for a minute: `what` names the awaited event and the
        thread that should have signalled it."""
        with self.lock:
            watchdog: Watchdog | None = None  # most waits are over at once
            while self.error is None and not ready():
                watchdog = watchdog or self.watchdog(what)
                watchdog.check(self._changes)
                self._main.wait(min(watchdog.interval, Condition.LIMIT))
            self.raise_error()

    @property
    def main_waits(self) -> bool:
        """Whether a pass waits for a transfer. Read under the lock."""
        return self._main.is_awaited

    def wait_uploader(self, poll: bool = False) -> None:
        """Called by the uploader's thread under the lock: sleeps until an entry may have changed;
        with `poll` for a short time only."""
        before = self.remote_progress() if poll else 0
        self._uploader.wait(_POLL_SECONDS if poll else Condition.LIMIT)
        if poll and self.remote_progress() != before:
            self.wake_main()  # its watchdog sees that other ranks are alive

    def wait_updates(self, poll: bool = False) -> None:
        """Called by an update thread under the lock: sleeps until there may be work; with `poll`
        for a short time only."""
        self._updates.wait(_POLL_SECONDS if poll else Condition.LIMIT)

    def wake_main(self) -> None:
        with self.lock:
            self._changes += 1
            self._main.notify_all()

    def wake_uploader(self) -> None:
        with self.lock:
            self._uploader.notify_all()

    def wake_update(self) -> None:
        """Wake one update thread. All of them would compete for the lock, and the thread that
        computes would wait for it with them."""
        with self.lock:
            self._updates.notify()

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
        """Record the first failure and wake all threads."""
        with self.lock:
            if self.error is None:
                self.error = error
            self.wake_all()

    def wake_all(self) -> None:
        self.wake_main()
        self.wake_uploader()
        self.wake_updates()
