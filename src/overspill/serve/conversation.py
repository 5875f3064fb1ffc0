"""The prompt of a chat, by the chat template of a model."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overspill.core.errors import ConfigError
from overspill.serve.text import Codec, check_text
from overspill.train.messages import Message, fit_template, read_message

Check = Callable[[str], None]
"""Function that raises for a text that cannot be a prompt."""


def has_template(codec: Codec | None) -> bool:
    tokenizer = getattr(codec, "tokenizer", None)
    return tokenizer is not None and tokenizer.chat_template is not None


def template_of(codec: Codec | None) -> str | None:
    """Return the text of the chat template; several templates follow each other."""
    if not has_template(codec):
        return None
    template: Any = codec.tokenizer.chat_template  # type: ignore[union-attr]
    return template if isinstance(template, str) else "\n".join(template.values())


def chat_tokens(
    codec: Codec | None,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    arguments: Mapping[str, Any],
    check: Check | None = None,
) -> list[int]:
    """Return the tokens of a chat by the chat template; without one, its lines as plain text.
    `check` may refuse the text before it is tokenized."""
    if not isinstance(messages, list | tuple):
        raise ConfigError(f"{reprlib.repr(messages)} is not a chat; give a list of messages")
    chat = [read_message(message) for message in messages]
    if codec is None:
        raise ConfigError("this model has no tokenizer; a chat needs one")
    if has_template(codec):
        return _by_template(codec, chat, None if tools is None else list(tools), arguments, check)
    if tools:
        raise ConfigError("this model has no chat template; tools need one")
    text = "\n".join(message["content"] or "" for message in chat)
    check_text(text)
    if check is not None:
        check(text)
    return codec.encode(text)


def _by_template(
    codec: Any,
    chat: list[dict[str, Any]],
    tools: list[Any] | None,
    arguments: Mapping[str, Any],
    check: Check | None,
) -> list[int]:
    options = {"add_generation_prompt": True, **arguments}

    def apply(messages: Sequence[Message], tokenize: bool) -> Any:
        # verbose: the length is checked elsewhere
        quiet = {"tokenizer_kwargs": {"verbose": False}}
        form = {"tokenize": tokenize, "return_dict": False, **quiet}
        try:
            return codec.tokenizer.apply_chat_template(
                list(messages), tools=tools, **{**options, **form}
            )
        except Exception as error:  # jinja and templates raise any type
            raise ConfigError(f"the chat template refuses this chat: {error}") from error

    accepted = fit_template(chat, lambda messages: str(apply(messages, False)))
    if check is not None:
        check(str(apply(accepted, False)))
    return [int(token) for token in apply(accepted, True)]
