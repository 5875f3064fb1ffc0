"""The prompt of a chat, by the chat template of a model."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from overspill.core.errors import ConfigError
from overspill.serve.text import Codec

Message = Mapping[str, Any]


def has_template(codec: Codec | None) -> bool:
    tokenizer = getattr(codec, "tokenizer", None)
    return tokenizer is not None and tokenizer.chat_template is not None


def template_of(codec: Codec | None) -> str | None:
    """The text of the chat template; of several, one after another."""
    if not has_template(codec):
        return None
    template: Any = codec.tokenizer.chat_template  # type: ignore[union-attr]
    return template if isinstance(template, str) else "\n".join(template.values())


def chat_tokens(
    codec: Codec | None,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    arguments: Mapping[str, Any],
) -> list[int]:
    """The tokens of a chat by the chat template; without one, its lines as plain text."""
    if not isinstance(messages, list | tuple):
        raise ConfigError(f"{reprlib.repr(messages)} is not a chat; give a list of messages")
    chat = [_read(message) for message in messages]
    if codec is None:
        raise ConfigError("this model has no tokenizer; a chat needs one")
    if has_template(codec):
        return _by_template(codec, chat, None if tools is None else list(tools), arguments)
    if tools:
        raise ConfigError("this model has no chat template; tools need one")
    return codec.encode("\n".join(message["content"] or "" for message in chat))


def _by_template(
    codec: Any, chat: list[dict[str, Any]], tools: list[Any] | None, arguments: Mapping[str, Any]
) -> list[int]:
    options = {"add_generation_prompt": True, **arguments}
    try:
        ids = _apply(codec, chat, tools, options)
    except ConfigError:
        if all(message["content"] is not None for message in chat):
            raise
        # some templates tell calls of tools by a missing text, others need one
        filled = [{**message, "content": message["content"] or ""} for message in chat]
        ids = _apply(codec, filled, tools, options)
    return [int(token) for token in ids]


def _apply(
    codec: Any, chat: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any]
) -> Any:
    try:
        return codec.tokenizer.apply_chat_template(
            chat, tools=tools, **{**options, "tokenize": True, "return_dict": False}
        )
    except Exception as error:  # jinja and templates raise any type
        raise ConfigError(f"the chat template refuses this chat: {error}") from error


def _read(message: Any) -> dict[str, Any]:
    """A message as templates expect it: its text in one piece, and arguments of tools as
    dictionaries."""
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
        parsed = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # the model wrote what is no JSON: it sees that again
    return {**call, "function": {**function, "arguments": parsed}}
