"""Messages of chats, in the form that chat templates expect."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overspill.core.errors import ConfigError
from overspill.core.json_text import parse_json

Message = Mapping[str, Any]


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
        return call  # the model wrote what is no JSON: it sees that again
    return {**call, "function": {**function, "arguments": parsed}}


def fill_texts(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> Sequence[Message]:
    """The messages, with empty texts for missing ones if the template needs that: some templates
    tell calls of tools by a missing text, others refuse it or write "None"."""
    if all(message["content"] is not None for message in messages):
        return messages
    filled = [{**message, "content": message["content"] or ""} for message in messages]
    try:
        text = render(messages)
    except ConfigError:
        return filled
    return (
        filled if "None" in text and text.count("None") > render(filled).count("None") else messages
    )
