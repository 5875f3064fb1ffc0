"""Server-sent events: a response that is sent while its answers are computed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from overspill.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
"""Clients ignore it."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events before it passes them on
]
_LAST_SECONDS = 5.0


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Response that sends events as they come. The status is sent before them, so an error is one
    more event."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        deadline: float,
        on_disconnect: Callable[[], None],
        explain: Callable[[BaseException], ApiError],
        on_end: Callable[[], None],
    ) -> None:
        """`deadline` is a time of the event loop. `explain` converts exceptions to errors for the
        client. `on_end` is called in any case."""
        super().__init__()
        self._events = events
        self._deadline = deadline
        self._on_disconnect = on_disconnect
        self._explain = explain
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(watch_disconnect(receive, self._on_disconnect))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            last = b""
            try:
                async with asyncio.timeout_at(self._deadline):
                    async for data in self._events:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                last = event(self._explain(error).body())
            # a client that does not read gets no end: its connection is closed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            watcher.cancel()
            self._on_end()


async def watch_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> None:
    """Call a function if the client disconnects before the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_disconnect()
