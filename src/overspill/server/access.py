"""Access to the server: keys, and pages in browsers."""

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from overspill.server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key."""


class Access:
    """Middleware that refuses requests without the key, and those that a page of another origin
    makes in the browser of a user.

    A page of any origin may send requests to 127.0.0.1, or let its own name point there (DNS
    rebinding). So a server without keys answers only to names of its own, and no server answers to
    the `Origin` of another page unless it is allowed.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], host: str, origins: Sequence[str]
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._origins = frozenset(origins)
        machine = socket.gethostname().lower()
        names = {"localhost", host.lower(), machine, f"{machine}.local"}
        self._names = names | {_name_of(_netloc_of(origin) or "") for origin in origins} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await _close(scope, receive, send)
        try:
            if scope["path"] not in OPEN_PATHS:
                headers: dict[bytes, bytes] = dict(scope["headers"])
                self._check_origin(headers)
                self._check_key(headers, scope["path"])
        except ApiError as error:
            return await error.send(scope, receive, send)
        await self._app(scope, receive, send)

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._keys and "*" not in self._origins and not self._is_own(_name_of(host)):
            raise ApiError(
                403,
                "this server does not answer to the name in the Host header; use its address, or "
                "start it with a key or --allow-origin",
                code="host_not_allowed",
            )
        if b"origin" not in headers or "*" in self._origins:
            return
        origin = headers[b"origin"].decode("latin-1")
        if origin not in self._origins and _netloc_of(origin) != host.lower():
            raise ApiError(
                403,
                "pages of this origin may not use this server; start it with --allow-origin",
                code="origin_not_allowed",
            )

    def _is_own(self, name: str) -> bool:
        if name in self._names:
            return True
        try:  # no page can make a browser take its own name for an address
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _check_key(self, headers: dict[bytes, bytes], path: str) -> None:
        if not self._keys:
            return
        given = _given_key(headers.get(b"authorization", b""))
        # all are compared, each in constant time: the time tells nothing about a key
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            problem = "is wrong" if given else "is missing: send `Authorization: Bearer KEY`"
            # a browser asks the user for a password if it opens the page, not if the page asks; it
            # sends the password for other files of the page only if it is asked for one again
            opens = path == "/" or path.startswith("/page/")
            challenge = 'Basic realm="overspill"' if opens else "Bearer"
            raise ApiError(
                401,
                f"the API key {problem}",
                code="invalid_api_key",
                headers={"WWW-Authenticate": challenge},
            )


def _netloc_of(origin: str) -> str | None:
    """Return the host and the port of an origin; None if it has none, such as "null"."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _name_of(netloc: str) -> str:
    """Return the host without its port, and without the brackets of an IPv6 address."""
    try:
        return (urlsplit(f"//{netloc}").hostname or "").lower()
    except ValueError:
        return ""


def _given_key(header: bytes) -> bytes:
    """Return the key of a Bearer token, or the password of a browser; empty if there is none."""
    scheme, _, value = header.partition(b" ")
    value = value.strip()
    if scheme.lower() != b"basic":
        return value if scheme.lower() == b"bearer" else b""
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


async def _close(scope: Scope, receive: Receive, send: Send) -> None:
    """Close a WebSocket: the server has none."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
