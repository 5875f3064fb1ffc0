"""Chats as prompts: tools, messages without text, and what a template refuses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill import LLM
from overspill.core.errors import ConfigError
from overspill.serve.conversation import chat_tokens
from overspill.train.tokenizer import ByteTokenizer
from overspill.train.trained import RunCodec
from tests.serve.models import served_gpt
from tests.serve.test_llm import checkpoint as checkpoint  # a fixture

TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is none %}none{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}{{ extra }}"
)
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", context=64) as made:
        yield made


@pytest.fixture
def template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the chat template of the model."""
    tokenizer = llm._source.codec.tokenizer  # type: ignore[union-attr]
    return lambda text: monkeypatch.setattr(tokenizer, "chat_template", text)


def text_of(llm: LLM, messages: list[Any], **options: Any) -> str:
    return llm.decode(llm.chat_tokens(messages, **options))


def test_a_template_gets_tools_and_arguments(llm: LLM, template: Any) -> None:
    assert not llm.has_chat_template
    template(TEMPLATE)
    assert llm.has_chat_template
    assert text_of(llm, [USER]) == "<user>hi<answer>"
    text = text_of(llm, [USER], tools=[TOOL], extra="!", add_generation_prompt=False)
    assert text == f"T{json.dumps([TOOL])}<user>hi!"


def test_transformers_does_not_warn_of_long_texts(
    llm: LLM, template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows neither `context` nor what the model allows."""
    tokenizer = llm._source.codec.tokenizer  # type: ignore[union-attr]
    monkeypatch.setattr(tokenizer, "model_max_length", 2)
    monkeypatch.setattr(tokenizer, "deprecation_warnings", {})  # it lists warnings that were given
    template(TEMPLATE)
    assert len(llm.chat_tokens([USER])) > 2
    assert len(llm.encode("text")) > 2
    assert not tokenizer.deprecation_warnings


def test_calls_of_tools_have_arguments_and_no_text(llm: LLM, template: Any) -> None:
    template(TEMPLATE)
    called = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"id": "2", "function": {"name": "f", "arguments": '{"a'}}
    deep = {"id": "3", "function": {"name": "f", "arguments": "[" * 10**5}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [called, broken]}]
    text = text_of(llm, [*chat, {"role": "tool", "content": "2", "tool_call_id": "1"}])
    # since transformers 5.23 templates get an empty text in place of none
    calls = '[{"a": 1}]["{\\"a"]<tool>2<answer>'
    assert text in (f"<user>hi<assistant>{none}{calls}" for none in ("none", ""))
    assert "[" * 10**5 in text_of(llm, [{"role": "assistant", "tool_calls": [deep]}])


def test_a_template_that_needs_text_gets_an_empty_one(llm: LLM, template: Any) -> None:
    template("{% for m in messages %}{{ m.role + ':' + m.content + '.' }}{% endfor %}")
    chat = [USER, {"role": "assistant", "content": None}, {"role": "assistant"}]
    assert text_of(llm, chat) == "user:hi.assistant:.assistant:."


def test_a_missing_text_is_not_written_as_none(llm: LLM, template: Any) -> None:
    template("{% for m in messages %}{{ m.role }}:{{ m.content }}.{% endfor %}")
    chat = [{"role": "user", "content": "None"}, {"role": "assistant", "content": None}]
    assert text_of(llm, chat) == "user:None.assistant:."


def test_a_template_that_needs_arguments_as_text_gets_them(llm: LLM, template: Any) -> None:
    """As DeepSeek's."""
    template(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ '[' + call.function.arguments + ']' }}{% endfor %}.{% endfor %}"
    )
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": "\u00e9"}'}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert text_of(llm, chat) == 'user:hi.assistant:[{"a": "\u00e9"}].'


def test_parts_of_text_are_joined(llm: LLM, template: Any) -> None:
    template(TEMPLATE)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of(llm, [{"role": "user", "content": parts}]) == "<user>ab<answer>"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi" * 999, "'hihi.{,40}' is not a message"),
        ({"content": "hi"}, "is not a message; give {'role': 'user'"),
        ({"role": 5, "content": "hi"}, "is not a message"),
        ({"role": "user", "content": 5}, "5 in a message is not text"),
        ({"role": "user", "content": ["hi"]}, "'hi' in a message is not text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "is not text"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "is not text"),
    ],
)
def test_what_is_no_message_is_named(llm: LLM, message: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        llm.chat_tokens([message])


def test_what_is_no_chat_is_named(llm: LLM) -> None:
    for chat in ("hi", None, {"role": "user"}):
        with pytest.raises(ConfigError, match="is not a chat; give a list of messages"):
            llm.chat_tokens(chat)  # type: ignore[arg-type]


def test_a_template_that_refuses_says_why(llm: LLM, template: Any) -> None:
    template("{{ raise_exception('only users may ask') }}")
    with pytest.raises(ConfigError, match="the chat template refuses this chat: only users may"):
        llm.chat_tokens([USER])
    template("{{ nonsense.x.y }}")
    with pytest.raises(ConfigError, match="the chat template refuses this chat"):
        llm.chat_tokens([{"role": "user", "content": None}])


def test_without_a_template_a_chat_is_its_lines(llm: LLM) -> None:
    chat = [USER, {"role": "assistant", "content": None}, {"role": "user", "content": "you"}]
    assert text_of(llm, chat) == "hi\n\nyou"
    with pytest.raises(ConfigError, match="no chat template; tools need one"):
        llm.chat_tokens(chat, tools=[TOOL])
    assert bytes(chat_tokens(RunCodec(ByteTokenizer()), chat, None, {})) == b"hi\n\nyou"


def test_tokens_that_the_model_does_not_have_are_named(llm: LLM) -> None:
    for token in (-1, 264, 10**12):
        for call in (lambda t=token: llm.decode([1, t]), lambda t=token: llm.token_bytes(t)):
            with pytest.raises(ConfigError, match=f"token id {token} is not one of the 264"):
                call()
    assert llm.token_bytes(263) == b"", "the tokenizer has fewer than the model"
    assert llm.decode(llm.encode("é a")) == "é a"


def test_a_model_without_a_tokenizer_has_no_text(tmp_path: Path) -> None:
    with served_gpt("gpu", tmp_path) as llm:
        for call in (
            lambda: llm.chat_tokens([USER]),
            lambda: llm.encode("a"),
            lambda: llm.decode([1]),
            lambda: llm.token_bytes(1),
        ):
            with pytest.raises(ConfigError, match="this model has no tokenizer"):
                call()
        assert not llm.has_chat_template
