"""Chats → rows in which only the answers of the assistant are learned."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from overspill.core.errors import ConfigError
from overspill.train.finetune.encoding import Tokenizer
from overspill.train.finetune.examples import Chat
from overspill.train.finetune.rows import Row, make_row

Span = tuple[int, int]


def set_template(tokenizer: Tokenizer, file: str | None) -> None:
    """Sets the template in `file`; without a file the tokenizer must have a template."""
    if file is not None:
        try:
            tokenizer.chat_template = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(
                f"--chat-template {file} cannot be read ({reason}); give another file"
            ) from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template, which chat messages "
            "need; give one with --chat-template FILE"
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path} does not report the offsets of tokens, which "
            "chat messages need; give a folder with a tokenizer.json with --tokenizer"
        )


def encode_chats(tokenizer: Tokenizer, examples: Sequence[Chat]) -> Iterator[Row]:
    marked = re.search(r"\{%-?\s*generation", tokenizer.get_chat_template()) is not None
    for example in examples:
        row = _marked_row(tokenizer, example) if marked else _searched_row(tokenizer, example)
        if not row.learned:
            raise ConfigError(
                f"{example.where}: the chat template renders no answer of the assistant; correct "
                "the template or the line"
            )
        yield row


def _marked_row(tokenizer: Tokenizer, example: Chat) -> Row:
    """For a template that marks what the model generates."""
    try:
        encoded = tokenizer.apply_chat_template(
            example.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:  # jinja and templates raise any type
        raise _refused(example, error) from error
    learn = [bool(flag) for flag in encoded["assistant_masks"]]
    return make_row(example.where, encoded["input_ids"], learn)


def _searched_row(tokenizer: Tokenizer, example: Chat) -> Row:
    text = _render(tokenizer, example, len(example.messages), False)
    spans = [
        _answer(tokenizer, example, number, text)
        for number, message in enumerate(example.messages)
        if message["role"] == "assistant"
    ]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learn = [
        any(start < last and end > first for first, last in spans)
        for start, end in encoded["offset_mapping"]
    ]
    return make_row(example.where, encoded["input_ids"], learn)


def _answer(tokenizer: Tokenizer, example: Chat, number: int, text: str) -> Span:
    """The span of message `number` in `text`: from the generation prompt to the end of the
    turn."""
    if number == 0:
        raise ConfigError(
            f'{example.where}: "messages" begin with the role "assistant"; put a message of the '
            "user first, or mark answers with {% generation %} in a template given with "
            "--chat-template"
        )
    turn = _render(tokenizer, example, number, True)
    end = _render(tokenizer, example, number + 1, False)
    if not (end.startswith(turn) and text.startswith(end)):
        raise ConfigError(
            f"{example.where}: the chat template renders earlier messages differently when others "
            "follow, so the answers cannot be located; mark them with {% generation %} in a "
            "template given with --chat-template"
        )
    start = len(turn)
    if turn == _render(tokenizer, example, number, False):
        # The template has no generation prompt: exclude the name of the role.
        start += max(0, end[start:].find(example.messages[number]["content"].strip()))
    return start, len(end)


def _render(tokenizer: Tokenizer, example: Chat, count: int, turn: bool) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                example.messages[:count], tokenize=False, add_generation_prompt=turn
            )
        )
    except Exception as error:  # jinja and templates raise any type
        raise _refused(example, error) from error


def _refused(example: Chat, error: Exception) -> ConfigError:
    return ConfigError(f"{example.where}: the chat template refuses these messages ({error})")
