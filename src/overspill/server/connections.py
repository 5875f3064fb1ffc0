"""Connections: limits that uvicorn does not have."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from overspill.server.errors import ApiError, invalid
from overspill.server.settings import LimitSection

_READ_BYTES = 16 << 10
_DISCARD_SECONDS = 5.0
"""For the rest of a request after its answer: a client that still sends may miss the answer if the
connection is closed at once."""


def connection_class(limits: LimitSection) -> type[H11Protocol]:
    """The protocol of connections with these limits."""

    class Connection(LimitedConnection):
        seconds = limits.body_timeout
        most = limits.max_connections

    return Connection


class LimitedConnection(H11Protocol):
    """Closes connections that send the headers of a request too slowly, that do not read their
    answer, or that are too many. Answers what is not HTTP with JSON."""

    seconds: float
    most: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refused = False  # what follows is discarded

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
            return
        # `pause_writing` for all that the client has not read: with the usual limit, the rest of an
        # answer below it keeps a connection open forever, also one that is being closed
        transport.set_write_buffer_limits(0)
        # asyncio reads 256 KiB at once: as a body in chunks of one byte, h11 needs seconds for them
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        cycle = self.cycle

        def end() -> None:
            if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
                self.transport.close()

        if self.conn.their_state is h11.SEND_BODY:
            # refused, without the key for example: what follows is discarded, but not forever
            self.loop.call_later(min(_DISCARD_SECONDS, self.seconds), end)

    def shutdown(self) -> None:
        if self._refused:  # the server ends, and need not wait for what is discarded
            self.transport.close()
        else:
            super().shutdown()

    def _watch_headers(self) -> None:
        """The timer runs from the first byte of the headers, or the start of the connection, until
        the headers are complete. Between requests, uvicorn's keep-alive timer runs instead."""
        waiting = self.conn.their_state is h11.IDLE
        if not waiting and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif waiting and self._header_timer is None and self.timeout_keep_alive_task is None:
            self._header_timer = self.loop.call_later(self.seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            message = f"the headers did not arrive within {self.seconds:g} seconds"
            self._answer(ApiError(408, message, code="request_timeout"))

    def send_400_response(self, msg: str) -> None:
        self._answer(invalid("this is not a valid HTTP request", code="invalid_http"))

    def _answer(self, error: ApiError) -> None:
        """Answers for the application, and closes."""
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        events = (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        )
        try:
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # the application has begun to answer
        if self.cycle is not None and not self.cycle.response_complete:
            # it reads the body: nothing that it sends may follow
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refused = True
        if not self.transport.is_closing():
            self.transport.write_eof()
        self.loop.call_later(min(_DISCARD_SECONDS, self.seconds), self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        if self._header_timer is not None:
            self._header_timer.cancel()
        super().connection_lost(exc)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
