"""Requests whose JSON schema takes long to compile: no other waits, and nothing outlives them."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

from overspill.serve.llm import LLM
from overspill.serve.schema_process import SchemaProcess
from tests.serve.test_schema_process import children
from tests.server.running import Running, running

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]


def asked(schema: dict[str, Any], **change: Any) -> dict[str, Any]:
    given = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"messages": USER, "response_format": given, "max_tokens": 8, **change}


def hours(number: int = 0) -> dict[str, Any]:
    """A schema that takes hours; each number gives another one."""
    return {"type": "integer", "multipleOf": 99999989 - 2 * number}


def tools(schema: dict[str, Any], choice: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "sum", "parameters": parameters}}
    return {"messages": USER, "tools": [tool], "tool_choice": choice, "max_tokens": 8}


@pytest.fixture
def process(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[SchemaProcess]:
    """Without limits that a test would reach."""
    yield from replaced(llm, monkeypatch, 2 << 30)


@pytest.fixture
def small_process(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[SchemaProcess]:
    yield from replaced(llm, monkeypatch, 16 << 20)


def replaced(llm: LLM, monkeypatch: pytest.MonkeyPatch, memory: int) -> Iterator[SchemaProcess]:
    process = SchemaProcess(600, memory)
    monkeypatch.setattr(llm._grammars, "_process", process)
    monkeypatch.setattr(llm._grammars, "_entries", OrderedDict())
    yield process
    process.close()


def send(server: Running, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    connection = server.connect()
    connection.sendall(
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        % (CHAT.encode(), len(data), data)
    )
    return connection


@pytest.mark.usefixtures("small_process")
def test_a_schema_that_is_too_complex_is_a_bad_request(server: Running) -> None:
    named = {"type": "function", "function": {"name": "sum"}}
    for body, what, param in (
        (asked(hours()), "json_schema", "response_format"),
        (tools(hours(1), "required"), "the JSON schema of tools", "tools"),
        (tools(hours(2), named), "the JSON schema of tools", "tools"),
    ):
        for stream in (False, True):
            answer = server.http.post(CHAT, json={**body, "stream": stream})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["message"].startswith(f"{what} is too complex: ")
            assert error["param"] == param
    assert server.wait_until(lambda: server.idle)


def test_others_are_answered_while_schemas_compile(
    process: SchemaProcess, server: Running, client: Any
) -> None:
    connections = [send(server, asked(hours(number))) for number in range(5)]
    assert server.wait_until(lambda: len(children(process)) == 5)
    plain = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
    assert plain.json()["usage"]["completion_tokens"] == 4
    other = server.http.post(CHAT, json=asked({"enum": ["yes", "no"]}))
    assert json.loads(other.json()["choices"][0]["message"]["content"]) in ("yes", "no")
    assert len(children(process)) == 5
    for connection in connections:
        connection.close()
    assert server.wait_until(lambda: server.idle and not children(process))


def test_a_schema_that_does_not_compile_in_time_is_given_up(
    process: SchemaProcess, llm: LLM
) -> None:
    with running(llm, request_timeout=0.5) as server:
        answer = server.http.post(CHAT, json=asked(hours()))
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
        assert server.wait_until(lambda: server.idle and not children(process))


def test_a_server_that_drains_does_not_wait_for_schemas(process: SchemaProcess, llm: LLM) -> None:
    with running(llm) as server:
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(server.http.post(CHAT, json=asked(hours())))
        )
        thread.start()
        assert server.wait_until(lambda: bool(children(process)))
        server.service.draining = True  # as after SIGTERM
        thread.join(30)
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "draining")
        assert server.wait_until(lambda: not children(process))


def test_answers_of_one_request_share_a_schema_that_compiles(
    process: SchemaProcess, server: Running
) -> None:
    body = asked({"type": "integer", "multipleOf": 7, "minimum": 7, "maximum": 700}, n=3)
    answer = server.http.post(CHAT, json=body).json()
    numbers = [int(choice["message"]["content"]) for choice in answer["choices"]]
    assert len(numbers) == 3
    assert all(number % 7 == 0 for number in numbers)
