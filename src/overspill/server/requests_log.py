"""Counters of requests, and their log."""

import json
import logging
import secrets
import time
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("overspill.server")


class RequestLog:
    """Middleware that gives each request an id and counts its status. With `logged` it also logs
    that many bytes of the body of each request, but no headers, since they have keys."""

    def __init__(
        self,
        app: ASGIApp,
        count: Callable[[str, int], None],
        paths: Collection[str],
        logged: int | None,
    ) -> None:
        """Only `paths` are counted and logged by name: a client can ask for any text."""
        self._app = app
        self._count = count
        self._paths = paths
        self._logged = logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        number, began = secrets.token_hex(8), time.perf_counter()
        status, body = 0, bytearray()

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                identity = (b"x-request-id", number.encode())
                message = {**message, "headers": [*message["headers"], identity]}
            await send(message)

        async def received() -> Message:
            message = await receive()
            # of a body that is too large, more is read than may be kept
            body.extend(message.get("body", b"")[: (self._logged or 0) - len(body)])
            return message

        try:
            await self._app(scope, receive if self._logged is None else received, sent)
        finally:
            path = self._path(scope)
            self._count(path, status)
            if self._logged is not None:
                entry = {
                    "id": number, "method": scope["method"], "path": path, "status": status,
                    "seconds": round(time.perf_counter() - began, 4),
                    "body": body.decode("utf-8", errors="replace"),
                }  # fmt: skip
                log.info("%s", json.dumps(entry))

    def _path(self, scope: Scope) -> str:
        # a request that was refused before it reached the application has no route
        route = getattr(scope.get("route"), "path", None)
        asked: str = scope["path"]
        return route or (asked if asked in self._paths else "other")
