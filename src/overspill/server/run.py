"""Start and end of the server."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from overspill.core.errors import ConfigError
from overspill.server.app import create_app
from overspill.server.connections import Connection
from overspill.server.service import Service
from overspill.server.settings import ServerConfig

log = logging.getLogger("overspill.server")

_KEEP_ALIVE = 30  # seconds
_CLOSING_SECONDS = 10
"""Time for clients to read their answers after all have ended."""
_FORCED_SECONDS = 10.0
"""Time for the last batch after a second signal, before the process ends anyway."""


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket with the address of the server. It is bound before the model is loaded: an
    address that is in use shows at once."""
    host, port = config.address.host, config.address.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # a name such as localhost may have both kinds of addresses: clients try IPv4 in any case
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # names such as a..b cannot be encoded
        reason = error.strerror if isinstance(error, OSError) else "not a name of a host"
        raise ConfigError(
            f"the server cannot listen on {host} port {port} ({reason}); give another "
            "--host or --port; --port 0 takes a free one"
        ) from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Return the URL for clients."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Server of uvicorn that drains at the first signal: it finishes answers in progress and
    refuses new requests. At the second signal it cancels the answers."""

    def __init__(self, service: Service, on_start: Callable[[], None]) -> None:
        limits = service.config.limits
        config = uvicorn.Config(
            create_app(service),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=limits.max_connections + 1,  # it counts the new one
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        super().__init__(config)
        self._service = service
        self._on_start = on_start
        self._signals: list[int] = []
        self._told = False
        # it warns of everything that is not HTTP
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only note the signal: it may interrupt anything. Unlike uvicorn's server, this one keeps
        listening while answers are finished, so that clients are told."""
        self._signals.append(sig)
        self._service.draining = True
        if len(self._signals) > 2:  # the event loop does not respond
            os._exit(0)

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends. Called ten times a second."""
        ended = await super().on_tick(counter)
        if self._service.draining:
            self._service.stop_compiling()
        if len(self._signals) > 1:
            _end_within(_FORCED_SECONDS)
            self._service.cancel_all()
            self.force_exit = True
        elif self._signals and not self._told:
            self._told = True
            name = signal.Signals(self._signals[0]).name
            log.warning("%s: finishing answers in progress; once more ends at once", name)
        return ended or self.force_exit or (self._service.draining and not self._service.busy)


def _end_within(seconds: float) -> None:
    """End the process after some seconds, even if a batch or the closing of files takes longer."""
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()


def serve(service: Service, bound: socket.socket, on_start: Callable[[], None]) -> bool:
    """Serve until a signal; return False if a second signal has ended the server. `on_start` is
    called when clients can connect."""
    server = Server(service, on_start)
    try:
        asyncio.run(server.serve([bound]))
    except OSError as error:
        raise ConfigError(
            f"the server cannot listen ({error.strerror}); use another --port"
        ) from error
    finally:
        service.close()
    return not server.force_exit
