"""Bodies, headers and connections that are too large, too slow or too many."""

import contextlib
import gzip
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from overspill.serve.llm import LLM
from overspill.server.run import bind
from overspill.server.settings import ServerConfig
from tests.server.running import Running, ScriptedLLM, running

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def small(llm: LLM) -> Iterator[Running]:
    with running(llm, max_body="1KiB", max_connections=8) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(llm: LLM) -> Iterator[Running]:
    with running(llm, body_timeout=0.3) as server:
        yield server


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def error_of(answer: bytes) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return json.loads(body)["error"]


def test_a_large_body_is_refused_before_it_is_read(small: Running) -> None:
    with small.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 9999999999\r\n\r\n")
        answer = b""
        while b"}}" not in answer:  # and none of the body is sent
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert error_of(answer)["code"] == "request_too_large"
    # a client that sends all of it gets the answer too
    answer = small.http.post("/v1/completions", json={"prompt": "a" * 3_000_000})
    assert answer.status_code == 413


def test_a_large_body_in_chunks_is_refused(small: Running) -> None:
    with small.connect() as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.sendall((b"200\r\n" + b"x" * 512 + b"\r\n") * 4)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_an_encoded_body_is_refused(small: Running) -> None:
    headers = {"Content-Encoding": "gzip"}
    packed = gzip.compress(b'{"prompt": "a"}')
    answer = small.http.post("/v1/completions", content=packed, headers=headers)
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]["message"]


@pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD, HEAD + b"Content-Length: 50\r\n\r\n{"])
def test_a_slow_request_is_ended(sent: bytes, impatient: Running) -> None:
    with impatient.connect() as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_of(answer)["code"] == "request_timeout"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\xff\xff\xff\r\n\r\n",
        b"GET /" + b"a" * 100_000,
        HEAD + b"X: " + b"a" * 1_000_000,
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_gets_an_answer(sent: bytes, small: Running) -> None:
    with small.connect() as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_of(answer)["type"] == "invalid_request_error"


def test_a_body_that_becomes_wrong_gets_one_answer(
    small: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """The application refuses it for its size, and the connection for its form."""
    chunk = b"200\r\n" + b"x" * 512 + b"\r\n"
    for parts in ([chunk * 3 + b"zz\r\n"], [chunk, b"zz\r\n"], [chunk * 3, b"zz\r\n"]):
        with small.connect() as connection:
            connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            for part in parts:
                connection.sendall(part)
                time.sleep(0.02)
            answer = read_all(connection)
        assert answer.count(b"HTTP/1.1 4") == 1
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "path", [pytest.param(b"GET /health", marks=pytest.mark.slow), b"POST /v1/models"]
)
def test_the_rest_of_a_body_after_the_answer_is_not_read_forever(path: bytes, llm: LLM) -> None:
    """Nothing has asked for it: neither does a client without the key reach the limits."""
    with running(llm, body_timeout=0.3, api_key="k") as server, server.connect() as connection:
        head = b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(path + head + b"a")
        assert read_all(connection).count(b"HTTP/1.1 ") == 1


def test_too_many_connections_are_closed_and_others_work(small: Running) -> None:
    opened = [small.connect() for _ in range(8)]
    try:
        with small.connect() as one_more, contextlib.suppress(ConnectionResetError):
            assert one_more.recv(1) == b""
    finally:
        for connection in opened:
            connection.close()
    assert small.wait_until(lambda: _answers(small))


def _answers(server: Running) -> bool:
    try:
        return server.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_the_rest_of_an_answer_that_is_not_read_keeps_no_connection_open(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is less than asyncio's limit, above which writing pauses."""

    def bind_small(config: ServerConfig) -> socket.socket:
        bound = bind(config)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    monkeypatch.setattr("tests.server.running.bind", bind_small)
    with running(llm, body_timeout=0.3) as server, socket.socket() as connection:
        whole = len(server.http.get("/page/markdown.js").content)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(b"GET /page/markdown.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert server.wait_until(lambda: not _is_kept(server, connection))
        read = 0
        with contextlib.suppress(ConnectionResetError):
            while read < whole and (part := connection.recv(65536)):
                read += len(part)
        assert 0 < read < whole


def _is_kept(server: Running, connection: socket.socket) -> bool:
    """Whether the server's end is open; the client sees its end only after all that was sent."""
    ends = [f"0100007F:{port:04X}" for port in (server.port, connection.getsockname()[1])]
    established = "01"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
    return any(row[1:4] == [*ends, established] for row in rows)


def test_a_client_that_does_not_read_is_disconnected(llm: LLM) -> None:
    """Its answer is larger than all buffers."""
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    endless = ScriptedLLM(llm, ["x" * 1_000_000] * 20)
    with running(endless, body_timeout=0.3) as server, server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert server.wait_until(lambda: server.service.rate.total > 0)
        assert server.wait_until(lambda: server.idle)
        assert len(read_all(connection)) < 20_000_000


def test_of_a_body_that_is_too_large_only_a_part_is_logged(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "overspill.server")
    with running(llm, max_body="1KiB", log_requests=True) as server:
        answer = server.http.post("/v1/completions", content=b"x" * 300_000)
    assert answer.status_code == 413
    (entry,) = [json.loads(each.getMessage()) for each in caplog.records if "413" in each.message]
    assert 0 < len(entry["body"]) <= 1024
