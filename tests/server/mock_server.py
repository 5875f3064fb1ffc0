"""A server with the page and prepared answers: what a model would say is chosen by the test."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from overspill.server.page import page_response, part_names, part_response

STATS: dict[str, Any] = {
    "model": "tiny",
    "running": 2,
    "waiting": 1,
    "tokens_per_second": 123.4,
    "kv_blocks": 64,
    "kv_blocks_free": 48,
    "bytes_per_tier": {"gpu": 3 << 30, "host": 12 << 30, "disk": 0},
    "budget_per_tier": {"gpu": 8 << 30, "host": 48 << 30, "disk": None},
    "gpu_reserved": 6 << 30,
    "hit_rate_per_layer": [0.0, 0.25, 0.5, 0.75, 1.0],
}


@dataclass
class Mock:
    """What the server answers next, and what it was asked."""

    address: str = ""
    model: str = "tiny"
    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo"])
    delay: float = 0.0
    """Seconds before each piece."""
    key: str | None = None
    refusal: tuple[int, str] | None = None
    """Status and message of an error instead of an answer."""
    code: str | None = None
    """Of that error."""
    context: int = 100
    prompt_tokens: int = 5
    finish_reason: str = "stop"
    gone: bool = False
    """No figures are given out: connections are closed at once."""
    stats: dict[str, Any] = field(default_factory=lambda: dict(STATS))
    asked: list[dict[str, Any]] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        self.__init__(self.address)  # type: ignore[misc]


class _Handler(BaseHTTPRequestHandler):
    mock: Mock

    def log_message(self, *_: Any) -> None:
        """Not on the terminal of the tests."""

    def do_GET(self) -> None:
        if self.path == "/":
            page = page_response()
            self._send(page.status_code, bytes(page.body), dict(page.headers))
        elif self.path.removeprefix("/page/") in part_names():
            part = part_response(self.path.removeprefix("/page/"))
            self._send(part.status_code, bytes(part.body), dict(part.headers))
        elif self._refuse_without_key():
            return
        elif self.path == "/stats":
            if self.mock.gone:
                self.close_connection = True
            else:
                self._json(200, self.mock.stats)
        elif self.path == "/v1/models":
            card = {
                "id": self.mock.model,
                "object": "model",
                "max_model_len": self.mock.context,
            }
            self._json(200, {"object": "list", "data": [card]})
        else:
            self._json(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refuse_without_key():
            return
        self.mock.asked.append(body)
        if self.mock.refusal is not None:
            status, message = self.mock.refusal
            headers = {"Retry-After": "7"} if status == 429 else {}
            error = {"message": message, "type": "x", "code": self.mock.code}
            self._json(status, {"error": error}, headers)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for data in _events(self.mock):
                time.sleep(self.mock.delay)
                self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            self.mock.disconnected.set()

    def _refuse_without_key(self) -> bool:
        key = self.mock.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._json(401, {"error": {"message": "a key is needed", "code": "invalid_api_key"}})
        return True

    def _json(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(status, json.dumps(content).encode(), kind | (headers or {}))

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def _events(mock: Mock) -> Iterator[bytes]:
    def event(choices: list[Any], **more: Any) -> bytes:
        return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"

    yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for piece in mock.pieces:
        yield event([{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
    yield event([{"index": 0, "delta": {}, "finish_reason": mock.finish_reason}])
    tokens = {"prompt_tokens": mock.prompt_tokens, "completion_tokens": len(mock.pieces)}
    yield event([], usage=tokens)
    yield b"data: [DONE]\n\n"


@contextmanager
def mock_server() -> Iterator[Mock]:
    mock = Mock()
    handler = type("Handler", (_Handler,), {"mock": mock})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    mock.address = f"http://127.0.0.1:{server.server_port}/"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield mock
    finally:
        server.shutdown()
        server.server_close()
