"""Ctrl-C and SIGTERM stop a run after the current step and save a checkpoint."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SAME = 2.0
"""Seconds within which another SIGTERM is the same request: job managers send one to the launcher,
which passes it on, and to its ranks."""


class StopSignal:
    """A context in which the first Ctrl-C or SIGTERM requests a stop and a second one raises."""

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self._since = 0.0
        self._on_request = on_request
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Only the main thread can set signal handlers; elsewhere those of the caller remain.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGTERM and time.monotonic() - self._since < _SAME:
                return
            raise KeyboardInterrupt
        self.requested, self._since = True, time.monotonic()
        self._on_request()
