"""Connections of uvicorn that read small pieces and send errors as JSON."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from overspill.server.errors import invalid

_READ_BYTES = 16 << 10


class Connection(H11Protocol):
    """HTTP connection that reads small pieces, and answers bytes that are not HTTP with JSON."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio reads 256 KiB at once: as a body in chunks of one byte, h11 needs seconds for them
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]

    def send_400_response(self, msg: str) -> None:
        error = invalid("this is not a valid HTTP request", code="invalid_http")
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
        self.transport.close()
