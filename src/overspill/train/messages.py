"""Messages of chats, in the form that chat templates expect."""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overspill.core.errors import ConfigError
from overspill.core.json_text import parse_json

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""Applies a template; raises ConfigError if the template refuses the messages."""


def read_message(message: Any) -> dict[str, Any]:
    """A message with its text in one piece, and arguments of tools as dictionaries."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(
            f"{reprlib.repr(message)} is not a message; give {{'role': 'user', 'content': 'text'}}"
        )
    read = {**message, "content": _text(message.get("content"))}
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        read["tool_calls"] = [_read_call(call) for call in calls]
    return read


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise ConfigError(
                f"{reprlib.repr(part)} in a message is not text; give a string, or parts such as "
                "{'type': 'text', 'text': '...'}"
            )
        texts.append(text)
    return "".join(texts)


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        parsed = parse_json(function["arguments"])
    except ValueError:
        return call  # the model wrote invalid JSON: it sees the same text again
    return {**call, "function": {**function, "arguments": parsed}}


def fit_template(messages: Sequence[Message], render: Render) -> Sequence[Message]:
    """The messages in the form that a template accepts.

    Some templates tell calls of tools by a missing text, others refuse it or write "None"; some
    take arguments of tools as JSON text.
    """
    forms = [messages]
    if any(message["content"] is None for message in messages):
        forms.append(_fill_texts(messages))
    if any(message.get("tool_calls") for message in messages):
        forms += [_write_arguments(form) for form in forms]
    if len(forms) == 1:
        return messages
    refused: ConfigError | None = None
    for form in forms:
        try:
            text = render(form)
        except ConfigError as error:
            refused = refused or error
        else:
            return _fill_texts(form) if _writes_none(form, text, render) else form
    assert refused is not None
    raise refused


def _writes_none(form: Sequence[Message], text: str, render: Render) -> bool:
    """Whether the template renders a missing text as "None"."""
    if "None" not in text or all(message["content"] is not None for message in form):
        return False
    try:
        return text.count("None") > render(_fill_texts(form)).count("None")
    except ConfigError:  # it needs the missing text
        return False


def _fill_texts(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "content": message["content"] or ""} for message in messages]


def _write_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of tools as JSON text."""
    return [
        {**message, "tool_calls": [_write_call(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _write_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), dict):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
