"""Function calls from the thread that computes to the event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable


class LoopQueue:
    """Queue of functions that the event loop calls.

    The loop is woken once for all pieces that a batch delivers, not for every request of it: waking
    it costs a system call, and both threads need Python's lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._functions: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def put(self, function: Callable[[], None]) -> None:
        """Have the event loop call a function soon. Any thread may call this."""
        # Appended before the flag is read, and `_call_all` clears the flag before it takes
        # anything: if the flag is set, `_call_all` will see this function.
        self._functions.append(function)
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop has ended: no client is waiting
                self._loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        self._scheduled = False
        while self._functions:
            self._functions.popleft()()
