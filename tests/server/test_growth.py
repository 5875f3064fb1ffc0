"""Requests over HTTP leave nothing behind in the server."""

from typing import Any

import pytest

from overspill.serve.llm import LLM
from tests.reachable import items_held
from tests.server.running import Running, running

CHAT = "/v1/chat/completions"


def send_each_kind(server: Running, number: int) -> None:
    """Unique prompts, schemas, paths, models and errors."""
    text = f"{number} is a number that no other prompt has"
    user = [{"role": "user", "content": text}]
    schema = {"name": "answer", "schema": {"enum": [number, f"{number}"]}}
    rules: dict[str, Any] = {"logit_bias": {f"{number % 99}": 1}, "stop": text, "seed": number}
    bodies = [
        ("/v1/completions", {"prompt": text, "max_tokens": 1, "n": 2, "user": text}),
        ("/v1/completions", {"prompt": [text, text[1:]], "max_tokens": 2, "logprobs": 1, **rules}),
        (CHAT, {"messages": user, "max_tokens": 2, "stream": True}),
        (CHAT, {"messages": user, "max_tokens": 2,
                "response_format": {"type": "json_schema", "json_schema": schema}}),
        (CHAT, {"messages": user, "max_tokens": 2, f"unknown{number}": 1}),
        (CHAT, {"messages": user, "max_tokens": 2, "model": text}),
    ]  # fmt: skip
    for path, body in bodies:
        server.http.post(path, json=body)
    with server.http.stream("POST", "/v1/completions", json={**bodies[0][1], "stream": True}):
        pass  # the client goes away
    for path in (f"/{number}", f"/v1/models/{number}", "/metrics"):
        server.http.get(path, params={"number": number})


@pytest.mark.slow
def test_unique_requests_leave_nothing_in_the_server(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.serve.grammar._KEPT", 4)
    with running(llm) as server:
        held = [0]
        for part in range(5):  # until nothing is added: connections come and go
            for number in range(10):
                send_each_kind(server, 100 * part + number)
            assert server.wait_until(lambda: server.idle)
            limited = len(llm._loop.stats.waits) + len(server.service.rate._steps)
            held.append(items_held(server.service) - limited)
            if held[-1] < held[-2] + 8:
                return
        raise AssertionError(f"it grows: {held}")
