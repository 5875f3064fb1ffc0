"""Limits on the bodies of requests, and on how many are in progress."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overspill.server.errors import ApiError
from overspill.server.settings import LimitSection

_DIGITS = 18
_DISCARD_BYTES = 64 << 20
_DISCARD_SECONDS = 5.0


class Disconnected(Exception):
    """The client has closed the connection before its request was complete."""


class Limits:
    """Middleware that reads the body of a request, within its limits, before the application sees
    the request. `post` is entered for each such request, and raises an error if the server is
    full."""

    def __init__(
        self, app: ASGIApp, limits: LimitSection, post: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._app = app
        self._most = limits.body_bytes
        self._seconds = limits.body_timeout
        self._post = post

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        try:
            with self._post():
                body = await self._read(scope, receive)
                await self._app(scope, _replay(body, receive), send)
        except ApiError as error:  # the application answers its own errors
            await _refuse(error, receive, send, 0 if error.status == 408 else _DISCARD_SECONDS)
        except Disconnected:
            pass  # no client waits for an answer

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity").lower() not in (b"identity", b""):
            raise _encoded()
        given = headers.get(b"content-length", b"0")  # h11 has checked its form
        if len(given) > _DIGITS or int(given) > self._most:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    body += message.get("body", b"")
                    if len(body) > self._most:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body of the request did not arrive within {self._seconds:g} seconds",
                code="request_timeout",
            ) from None

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body of the request is larger than {self._most} bytes; the server's --max-body "
            "limits it",
            code="request_too_large",
        )


def _encoded() -> ApiError:
    """Return the error for an encoded body: a small one could become large, so none is decoded."""
    return ApiError(
        415,
        "a body with a Content-Encoding, such as gzip, is not supported; send it as it is",
        code="unsupported_encoding",
        headers={"Accept-Encoding": "identity"},
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives the body again in one piece, then later messages."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _refuse(error: ApiError, receive: Receive, send: Send, seconds: float) -> None:
    """Answer before the body was read. Data that the client sends meanwhile are read and discarded
    for some seconds: a connection that is closed with unread data resets, and the client may lose
    the answer."""
    response = error.response()
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    left = _DISCARD_BYTES
    try:
        async with asyncio.timeout(seconds):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
    except TimeoutError:
        pass  # it sends too slowly: the connection is closed now
    await send({"type": "http.response.body", "body": b"", "more_body": False})
