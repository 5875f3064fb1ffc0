"""From the thread that computes to the event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

Delivery = Callable[[], None]


class Bridge:
    """Calls functions in the event loop for the thread that computes.

    The loop is woken once for all that a batch delivers, not for every request of it: waking it
    costs a system call, and both threads need Python's lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._deliveries: deque[Delivery] = deque()
        self._scheduled = False

    def put(self, delivery: Delivery) -> None:
        """From any thread."""
        # Appended before the flag is read, and `_deliver` clears the flag before it takes anything:
        # if the flag is set, `_deliver` will see this delivery.
        self._deliveries.append(delivery)
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop has ended: no client is waiting
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        while self._deliveries:
            self._deliveries.popleft()()
