"""Bodies, headers and connections that are too large, too slow or too many."""

import contextlib
import gzip
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from overspill.serve.llm import LLM
from tests.server.running import Running, ScriptedLLM, running

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def small(llm: LLM) -> Iterator[Running]:
    with running(llm, max_body="1KiB", max_connections=8) as server:
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


def test_a_slow_body_is_ended(llm: LLM) -> None:
    with running(llm, body_timeout=0.3) as server, server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 50\r\n\r\n{")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_of(answer)["code"] == "request_timeout"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\xff\xff\xff\r\n\r\n",
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


@pytest.mark.parametrize("sent", [b"GET /" + b"a" * 100_000, HEAD + b"X: " + b"a" * 1_000_000])
def test_headers_without_end_are_not_read(sent: bytes, small: Running) -> None:
    with small.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert small.http.get("/health").status_code == 200


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


def test_too_many_connections_are_refused_and_others_work(small: Running) -> None:
    opened = [small.connect() for _ in range(8)]
    try:
        with small.connect() as one_more:
            one_more.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert one_more.recv(65536).startswith(b"HTTP/1.1 503 ")
    finally:
        for connection in opened:
            connection.close()
    assert small.wait_until(lambda: small.http.get("/health").status_code == 200)


def test_a_client_that_does_not_read_holds_no_place_in_the_queue(llm: LLM) -> None:
    """Its answer is larger than all buffers."""
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    endless = ScriptedLLM(llm, ["x" * 1_000_000] * 20)
    with running(endless, request_timeout=1) as server, server.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert server.wait_until(lambda: server.service.rate.total > 0)
        assert server.wait_until(lambda: server.idle)


def test_of_a_body_that_is_too_large_only_a_part_is_logged(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "overspill.server")
    with running(llm, max_body="1KiB", log_requests=True) as server:
        answer = server.http.post("/v1/completions", content=b"x" * 300_000)
    assert answer.status_code == 413
    (entry,) = [json.loads(each.getMessage()) for each in caplog.records if "413" in each.message]
    assert 0 < len(entry["body"]) <= 1024
