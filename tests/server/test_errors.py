"""Wrong requests: the exceptions of OpenAI's client, and what they say."""

import json
import logging
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import ValidationError

from overspill.core.errors import DiskError, EngineError
from overspill.serve.llm import LLM
from overspill.server.chat import template_arguments
from overspill.server.protocol import ChatRequest, CompletionRequest, Shared
from tests.server.running import HeldLLM, Running, ScriptedLLM, running

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
WRONG_TOOL: dict[str, Any] = {
    "type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}},
}  # fmt: skip
LONG_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"x": {"const": "x" * 70_000}}}},
}


def schema(**content: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": schema(type="nonsense")}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WRONG_TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [LONG_TOOL], "tool_choice": "required"}, "tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"unknown": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": "a"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"shout": [1]}}, "chat_template_kwargs['shout']"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"min_p": 0.1}, "min_p"),
        ({"temprature": 1}, "temprature"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": "a"}, "prompt"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ],
)
def test_a_wrong_value_is_a_bad_request_that_names_it(
    change: dict[str, Any], param: str | None, client: OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body={**CHAT, **change}, cast_to=object)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "at least one"),
        ({"prompt": ""}, "empty"),
        ({"prompt": ["a", ""]}, "empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": [300]}, "token id 300"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"suffix": "b"}, "suffix is not supported"),
        ({"echo": True, "logprobs": 1}, "leave out echo"),
        ({"prompt": ["a"] * 100}, "fewer"),
        ({"max_completion_tokens": 3}, "'max_completion_tokens' is not supported"),
        ({"top_logprobs": 3}, "'top_logprobs' is not supported"),
    ],
)
def test_a_wrong_completion_is_explained(
    change: dict[str, Any], message: str, client: OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.post("/completions", body={"model": "tiny", "prompt": "a", **change}, cast_to=object)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("token", [300, -1])
def test_a_wrong_token_names_the_prompt(echo: bool, token: int, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"token id {token}") as caught:
        client.completions.create(model="tiny", prompt=[token], echo=echo)
    assert caught.value.param == "prompt"


def test_a_schema_that_a_busy_machine_cannot_compile_may_be_sent_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.serve.schema_process._WAIT_SECONDS", 1e-6)
    body = {**CHAT, "response_format": schema(type="integer", minimum=3)}
    with running(llm) as server:
        answer = server.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert answer.json()["error"]["param"] == "response_format"
        monkeypatch.undo()
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "n": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_of_a_request_is_a_bad_request(body: bytes, server: Running) -> None:
    answer = server.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (CompletionRequest, {"prompt": [None] * 300_000}),
        (CompletionRequest, {"prompt": [[None] * 300_000]}),
        (CompletionRequest, {"prompt": "a", "stop": [None] * 300_000}),
        (ChatRequest, {"messages": [{}] * 300_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 300_000}]}),
        (ChatRequest, {"logit_bias": dict.fromkeys(map(str, range(100_000)))}),
        (ChatRequest, {"chat_template_kwargs": dict.fromkeys(map(str, range(100_000)))}),
    ],
    ids=lambda value: list(value)[-1] if isinstance(value, dict) else value.__name__,
)
def test_many_wrong_values_are_refused_at_the_first(
    kind: type[Shared], wrong: dict[str, Any]
) -> None:
    """To describe all of them would stop the server for long."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps({**CHAT, **wrong}))
    assert caught.value.error_count() < 10


def test_a_tool_that_is_not_there_is_named_in_short(client: OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1000)]
    choice = {"type": "function", "function": {"name": "g" * 100_000}}
    body = {**CHAT, "tools": tools, "tool_choice": choice}
    with pytest.raises(openai.BadRequestError, match="tool_choice names 'ggg") as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert len(caught.value.message) < 500


def test_a_prompt_beyond_the_context_says_so(client: OpenAI) -> None:
    for ask in (
        lambda: client.completions.create(model="tiny", prompt="a" * 512),
        lambda: client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a" * 5000}]
        ),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_is_far_too_long_is_not_tokenized(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> list[int]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(llm, "least_tokens", lambda text: len(text) // 4)
    monkeypatch.setattr(llm, "encode", encode)
    text = "a " * 1_000_000
    chat = {"messages": [{"role": "user", "content": text}]}
    with running(llm) as server:
        for path, body in (("completions", {"prompt": text}), ("chat/completions", chat)):
            answer = server.http.post(f"/v1/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "the prompt has at least 5000" in error["message"]


def test_what_does_not_exist_is_not_found(client: OpenAI, server: Running) -> None:
    for ask in (
        lambda: client.completions.create(model="gpt-9", prompt="a"),
        lambda: client.models.retrieve("gpt-9"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match=r"'/v1/embeddings'; the API has /v1/chat/.*"):
        client.embeddings.create(model="tiny", input="a")
    answer = server.http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "takes POST, not GET" in answer.json()["error"]["message"]
    answer = server.http.post("/chat/completions", json=CHAT)  # of a client without /v1
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]


def test_a_full_queue_is_a_rate_limit_and_counts_all_samples(llm: LLM) -> None:
    held = HeldLLM(llm)
    with running(held, max_batch=2, max_queue=1) as server, server.client() as client:
        import concurrent.futures

        options: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            first = pool.submit(client.completions.create, n=2, **options)
            assert server.wait_until(lambda: server.service.in_flight == 2)
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(n=2, **options)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            second = pool.submit(client.completions.create, **options)
            assert server.wait_until(lambda: server.service.in_flight == 3)
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**options)
            held.go.set()
            assert len(first.result().choices) == 2
            assert len(second.result().choices) == 1
        assert server.wait_until(lambda: server.idle)


def test_an_answer_that_takes_too_long_is_ended(llm: LLM) -> None:
    options: dict[str, Any] = {
        "model": "tiny", "prompt": "a", "max_tokens": 500, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    with running(llm, request_timeout=0.1) as server, server.client() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**options)
        assert caught.value.status_code == 408
        assert caught.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match="not complete after"):
            list(client.completions.create(stream=True, **options))
        assert server.wait_until(lambda: server.idle)


def test_a_failure_of_the_engine_is_one_answer_and_one_line_in_the_log(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ScriptedLLM(llm, ["a"], DiskError("expert 3 cannot be read"))
    with running(broken) as server, server.client() as client:
        with caplog.at_level(logging.INFO), pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny", prompt="secret")
        assert "log" in str(caught.value)
        with pytest.raises(openai.APIError):
            list(client.completions.create(model="tiny", prompt="secret", stream=True))
        assert server.http.get("/health").json() == {"status": "ok"}
    assert "expert 3 cannot be read" in caplog.text
    assert "secret" not in caplog.text


def test_an_engine_that_has_failed_shows_in_the_health(llm: LLM) -> None:
    class Dead(HeldLLM):
        def submit(self, *args: Any, **options: Any) -> Any:
            raise EngineError("the thread that computes submissions has failed")

    with running(Dead(llm)) as server, server.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny", prompt="a")
        assert caught.value.status_code == 503
        health = server.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        assert server.service.in_flight == 0


def test_fields_that_change_nothing_are_accepted(client: OpenAI) -> None:
    made = client.chat.completions.create(
        messages=CHAT["messages"], model="tiny", max_tokens=2, user="me", store=True,
        metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, prompt_cache_key="a",
        extra_body={"min_p": 0.0, "repetition_penalty": 1.0, "best_of": 1, "unknown": None},
    )  # fmt: skip
    assert made.choices[0].finish_reason == "length"


def test_the_effort_of_reasoning_is_a_variable_of_the_template() -> None:
    body = ChatRequest.model_validate({**CHAT, "reasoning_effort": "low"})
    made = template_arguments(body, "Reasoning: {{ reasoning_effort }}")
    assert made == {"reasoning_effort": "low"}


def test_errors_never_repeat_the_value(server: Running) -> None:
    body = {**CHAT, "temperature": "a secret"}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert "secret" not in json.dumps(answer.json())


@pytest.mark.parametrize("value", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[" + "9" * 5000])
@pytest.mark.parametrize("field", ["messages", "tools", "response_format", "logit_bias", "seed"])
def test_json_that_python_cannot_hold_is_a_bad_request(
    field: str, value: str, server: Running
) -> None:
    body = json.dumps({**CHAT, "max_tokens": 1})[:-1] + f', "{field}": {value}'
    answer = server.http.post("/v1/chat/completions", content=body + "}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body is not valid JSON")
