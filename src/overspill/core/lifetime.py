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
        """Whether this is a forked child. It has neither the engine's threads nor its memory, and
        its locks may be held for ever."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        if self.forked:
            raise OrderError(
                "the model was offloaded by another process, of which this one is a fork without "
                "the experts; use the model there, or load it here"
            )

    def check(self) -> None:
        """Raises if the engine cannot be used."""
        self.check_process()
        if self.closed:
            raise OrderError("the engine is closed and its experts are gone; load the model again")


store_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Of all engines. A device may wait for a native thread that waits for one of them."""


def outside_engine_threads(function: Callable[[], object]) -> None:
    """Calls a function that waits for an engine or its device, from the garbage collector. That may
    run in a thread that holds what the function waits for, of an engine, or a native one, or with
    the lock of a store: then another thread calls it."""
    engine_thread = threading.current_thread().name.startswith(("overspill-", "Dummy-"))
    if engine_thread or any(lock._is_owned() for lock in store_locks):
        threading.Thread(target=function, name="close", daemon=True).start()
    else:
        function()
