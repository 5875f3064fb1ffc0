"""Ctrl-C that takes effect only where a procedure can be undone."""

import signal
import threading
from types import FrameType
from typing import Self


class DeferredInterrupt:
    """A context in which the first Ctrl-C takes effect in `check` or at the end, the second at
    once. A signal handler of the caller, and threads other than the main one, are left alone."""

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
