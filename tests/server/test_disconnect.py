"""A client that goes away frees what its request held."""

import json

import pytest

from overspill.serve.llm import LLM
from overspill.server import request
from tests.server.running import HeldLLM, Running, WaitingLLM, running

LONG = {"prompt": "Hello", "max_tokens": 500, "ignore_eos": True}


def start(server: Running, **change: object) -> object:
    body = json.dumps({**LONG, **change}).encode()
    connection = server.connect()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_answers_in_progress_are_cancelled(stream: bool, server: Running) -> None:
    before = server.service.rate.total
    connection = start(server, stream=stream, n=6)  # two of them wait
    assert server.wait_until(lambda: server.service.rate.total > before)
    connection.close()  # type: ignore[attr-defined]
    assert server.wait_until(lambda: server.idle)
    assert server.service.rate.total - before < 6 * 500
    assert b"overspill_cancelled_total 0.0" not in server.service.metrics.text()


def test_a_stream_that_waits_sends_comments(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of OpenAI's API skip them."""
    monkeypatch.setattr(request, "KEEP_ALIVE", 0.01)
    waiting = WaitingLLM(llm)
    with running(waiting) as server, server.client() as client:
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": waiting"
            waiting.finish("text")
            assert "data: [DONE]" in list(lines)
        chunks = client.completions.create(model="tiny", prompt="a", stream=True)
        waiting.finish("text")
        assert "".join(chunk.choices[0].text for chunk in chunks) == "text"


def test_answers_that_have_not_begun_are_cancelled(llm: LLM) -> None:
    held = HeldLLM(llm)
    with running(held) as server:
        connection = start(server, stream=True)
        assert server.wait_until(lambda: server.service.in_flight == 1)
        connection.close()  # type: ignore[attr-defined]
        held.go.set()
        assert server.wait_until(lambda: server.idle)
        assert server.service.rate.total < 500
