"""The client of OpenAI gets what the engine gives."""

import json
from typing import Any

import pytest
from openai import OpenAI

from overspill.serve.llm import LLM
from overspill.serve.params import SamplingParams
from tests.server.running import Running

CHAT: list[Any] = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
        },
    },
}


def test_a_chat_is_answered_as_by_generate(client: OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate([llm.chat_tokens(CHAT)], SamplingParams(max_tokens=12))
    answer = client.chat.completions.create(messages=CHAT, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == expected.text
    assert len(expected.text) == 12
    assert choice.finish_reason == "length"
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(llm.chat_tokens(CHAT))
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=CHAT, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
    assert text == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == "length"
    assert len(parts) > 6  # not all at once
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_tokens_that_were_computed_before_count_as_cached(client: OpenAI) -> None:
    prompt = "a prompt that no other test has, and that is longer than a block"
    first, second = (client.completions.create(prompt=prompt, **GREEDY) for _ in range(2))
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second)]  # type: ignore[union-attr]
    assert cached == [0, (len(prompt) - 1) // 16 * 16]
    assert first.choices[0].text == second.choices[0].text


def test_prompts_may_be_texts_or_tokens_one_or_several(client: OpenAI, llm: LLM) -> None:
    texts = ["One two", "three"]
    ids = [llm.encode(text) for text in texts]
    expected = [each.text for each in llm.generate(texts, SamplingParams(max_tokens=12))]
    for prompt, count in ((texts, 2), (ids, 2), (texts[0], 1), (ids[0], 1)):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected[:count]
        assert [choice.index for choice in answer.choices] == list(range(count))
    echoed = client.completions.create(prompt=ids, echo=True, **GREEDY)
    assert [c.text for c in echoed.choices] == [a + b for a, b in zip(texts, expected, strict=True)]
    stream = client.completions.create(prompt=texts, echo=True, stream=True, **GREEDY)
    joined = ["", ""]
    for chunk in stream:
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == [choice.text for choice in echoed.choices]


def test_samples_with_a_seed_differ_and_come_again(client: OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        made = client.chat.completions.create(
            model="tiny", messages=CHAT, n=3, seed=seed, max_completion_tokens=10, top_p=0.9,
            extra_body={"top_k": 40},
        )  # fmt: skip
        return [choice.message.content for choice in made.choices]

    first = ask(3)
    assert len(set(first)) == 3
    assert ask(3) == first
    assert ask(400) != first


def test_a_stop_text_ends_an_answer_before_it(client: OpenAI) -> None:
    whole = client.completions.create(prompt="Hello", **GREEDY).choices[0].text
    stop = whole[5:7]
    made = client.completions.create(prompt="Hello", stop=["never seen", stop], **GREEDY).choices[0]
    assert made.text == whole[: whole.index(stop)]
    assert made.finish_reason == "stop"


def test_penalties_and_bias_change_the_answer(client: OpenAI, llm: LLM) -> None:
    (token,) = llm.encode("Z")
    made = client.completions.create(prompt="Hello", logit_bias={str(token): 100}, **GREEDY)
    assert made.choices[0].text == "Z" * 12
    made = client.completions.create(
        prompt="Hello", logit_bias={str(token): 2}, frequency_penalty=2, presence_penalty=2,
        **GREEDY,
    )  # fmt: skip
    assert made.choices[0].text != "Z" * 12


def test_log_probabilities_are_those_of_the_engine(client: OpenAI, llm: LLM) -> None:
    tokens = llm.chat_tokens(CHAT)
    (expected,) = llm.generate([tokens], SamplingParams(max_tokens=12, logprobs=3))
    assert expected.logprobs is not None
    options: dict[str, Any] = {"messages": CHAT, "logprobs": True, "top_logprobs": 3, **GREEDY}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    parts = [
        entry
        for chunk in client.chat.completions.create(stream=True, **options)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert whole.content == parts
    for entry, token, logs in zip(parts, expected.token_ids, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(logs[token], abs=1e-5)
        assert bytes(entry.bytes) == llm.token_bytes(token)
        tops = [top.logprob for top in entry.top_logprobs]
        assert tops == pytest.approx(sorted(logs.values(), reverse=True)[:3], abs=1e-5)
    completion = client.completions.create(prompt=tokens, logprobs=3, **GREEDY).choices[0]
    assert completion.logprobs is not None
    assert "".join(completion.logprobs.tokens or []) == completion.text == expected.text
    assert completion.logprobs.token_logprobs == pytest.approx([e.logprob for e in parts])
    assert completion.logprobs.text_offset == list(range(12))


def test_log_probabilities_of_parts_of_characters_have_places_in_the_text(
    client: OpenAI, llm: LLM
) -> None:
    """A favoured first byte of three is followed by no second one, and is one character."""
    (byte, *_) = llm.encode("€")
    options: Any = {"prompt": "Hello", "logprobs": 1, "logit_bias": {str(byte): 100}, **GREEDY}
    whole = client.completions.create(**options).choices[0]
    parts = [
        chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **options)
    ]
    assert whole.text == "\ufffd" * 12
    for logs in (whole.logprobs, parts[0]):
        assert logs is not None
        assert logs.tokens[0] == "bytes:\\xe2"
        assert len(logs.top_logprobs[0]) == 2  # the likeliest, and the one that was taken
        assert logs.tokens[0] in logs.top_logprobs[0]
    assert whole.logprobs.text_offset == [0, *range(11)]  # whether it goes on is not known at once
    assert [offset for logs in parts if logs for offset in logs.text_offset] == [0, *range(11)]


def test_an_answer_follows_a_json_schema(client: OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for temperature in (0.0, 1.0):
        made = client.chat.completions.create(
            model="tiny", messages=CHAT, response_format=schema, temperature=temperature,
            max_tokens=200, seed=1,
        )  # fmt: skip
        value = json.loads(made.choices[0].message.content or "")
        assert set(value) == {"ok", "size"}
        assert value["size"] in ("small", "large")
        assert made.choices[0].finish_reason == "stop"


def test_a_tool_that_is_chosen_is_called(client: OpenAI) -> None:
    choices: list[Any] = [{"type": "function", "function": {"name": "weather"}}, "required"]
    for choice, reason in zip(choices, ("stop", "tool_calls"), strict=True):
        options: Any = {
            "model": "tiny", "messages": CHAT, "tools": [WEATHER], "tool_choice": choice,
            "max_tokens": 200, "temperature": 0,
        }  # fmt: skip
        made = client.chat.completions.create(**options).choices[0]
        (call,) = made.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        assert made.message.content is None
        assert made.finish_reason == reason
        deltas = [
            delta
            for chunk in client.chat.completions.create(stream=True, **options)
            for delta in chunk.choices[0].delta.tool_calls or []
        ]
        assert deltas[0].id
        assert deltas[0].function.name == "weather"
        joined = "".join(delta.function.arguments for delta in deltas)
        assert json.loads(joined) == json.loads(call.function.arguments)


def test_a_conversation_with_calls_is_read_by_the_template(client: OpenAI, llm: LLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    chat: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "ow"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    made = client.chat.completions.create(
        messages=chat, tools=[WEATHER], extra_body={"chat_template_kwargs": {"shout": True}},
        **GREEDY,
    )  # fmt: skip
    tokens = llm.chat_tokens(chat, [WEATHER], shout=True)
    assert tokens == llm.chat_tokens(
        [{"role": "user", "content": "How"}, *chat[1:]], [WEATHER], shout=True
    )
    (expected,) = llm.generate([tokens], SamplingParams(max_tokens=12))
    assert made.choices[0].message.content == expected.text


def test_an_assistant_without_text_has_said_nothing_or_refused(client: OpenAI, llm: LLM) -> None:
    given = {"role": "assistant", "content": None, "audio": None, "function_call": None}
    for more, text in (({}, ""), ({"refusal": "No."}, "No."), ({"tool_calls": []}, "")):
        chat: Any = [CHAT[1], {**given, **more}, CHAT[1]]
        made = client.chat.completions.create(messages=chat, **GREEDY)
        same = [CHAT[1], {"role": "assistant", "content": text}, CHAT[1]]
        (expected,) = llm.generate([llm.chat_tokens(same)], SamplingParams(max_tokens=12))
        assert made.choices[0].message.content == expected.text


def test_the_model_is_listed_and_known_by_its_names(client: OpenAI, server: Running) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    for name in ("tiny", "models/tiny"):
        assert client.models.retrieve(name).id == "tiny"
        options = {**GREEDY, "model": name}
        assert client.completions.create(prompt="a", **options).model == "tiny"
