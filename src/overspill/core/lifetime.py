"""The lifetime of an engine: until it is closed, in the process that started it."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from overspill.core.errors import OrderError


class Lifetime:
    def __init__(self) -> None:
        self.closed = False
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that opened the engine. It has neither the
        engine's threads nor its memory, and its locks may be held for ever."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        if self.forked:
            raise OrderError(
                "the model was offloaded by another process, of which this one is a fork without "
                "the experts; use the model there, or load it here"
            )

    def check(self) -> None:
        """Raise an OrderError if the engine cannot be used."""
        self.check_process()
        if self.closed:
            raise OrderError("the engine is closed and its experts are gone; load the model again")


store_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The locks of the stores of all engines. A device may wait for a native thread that waits for one
of them."""


def outside_engine_threads(function: Callable[[], object]) -> None:
    """Call a function that waits for an engine or its device, on behalf of the garbage collector.

    The collector may run in a thread for which the function would wait (of an engine, or a native
    thread), or in one that holds the lock of a store: then another thread calls the function.
    """
    engine_thread = threading.current_thread().name.startswith(("overspill-", "Dummy-"))
    if engine_thread or any(lock._is_owned() for lock in store_locks):
        threading.Thread(target=function, name="close", daemon=True).start()
    else:
        function()
