"""Ctrl-C and SIGTERM stop a run after the current step and save a checkpoint."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class StopSignal:
    """A context in which the first Ctrl-C or SIGTERM requests a stop and a second one raises."""

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
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
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()
