"""Chats → rows in which only the answers of the assistant are learned."""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from overspill.core.errors import ConfigError
from overspill.train.finetune.encoding import Tokenizer
from overspill.train.finetune.kinds import Chat
from overspill.train.finetune.rows import Row, make_row
from overspill.train.messages import Message, fit_template

Span = tuple[int, int]

_MARKS = re.compile(r"\{%-?\s*generation")
_BESIDE_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that the model writes, like its content."""


def set_template(tokenizer: Tokenizer, file: str | None) -> None:
    """Sets the template in `file`; without a file the tokenizer must have a template."""
    if file is not None:
        try:
            tokenizer.chat_template = Path(file).expanduser().read_text(encoding="utf-8-sig")
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
    for example in examples:
        renderer = _Renderer(tokenizer, example)
        text, spans = renderer.marked() if renderer.marks else _find_answers(renderer)
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        learn = [
            any(start < last and end > first for first, last in spans if first < last)
            for start, end in encoded["offset_mapping"]
        ]
        row = make_row(example.where, encoded["input_ids"], learn)
        if not row.learned:
            raise ConfigError(
                f"{example.where}: the chat template renders no answer of the assistant; correct "
                "the template or the line"
            )
        yield row


class LastAnswer(NamedTuple):
    prompt: str
    """The chat up to the answer, as the template renders it."""
    answer: str
    closing: str
    """Text that the template renders after an answer without a following message."""


def last_answers(tokenizer: Tokenizer, examples: Sequence[Chat]) -> Iterator[LastAnswer]:
    """Of each chat, the last answer of the assistant that is text without calls of tools."""
    for example in examples:
        renderer = _Renderer(tokenizer, example)
        messages = renderer.messages
        numbers = [
            number
            for number, message in enumerate(messages)
            if number > 0 and message["role"] == "assistant" and not message.get("tool_calls")
            and isinstance(message.get("content"), str) and message["content"].strip()
        ]  # fmt: skip
        if not numbers:
            raise ConfigError(
                f"{example.where}: --metric needs an answer of the assistant in text that follows "
                "another message; remove the line, or drop --metric"
            )
        prompt = renderer.text(messages[: numbers[-1]], opens_turn=True)
        around = _around(renderer, numbers[-1], renderer.text(messages))
        closing = "" if around is None else around.closing
        yield LastAnswer(prompt, messages[numbers[-1]]["content"], closing.lstrip())


class _Renderer:
    """Renderer of a chat template, for the messages of an example and for variants of them."""

    def __init__(self, tokenizer: Tokenizer, example: Chat) -> None:
        self.where = example.where
        self._tokenizer = tokenizer
        self._tools = example.tools
        try:
            self._template: str = tokenizer.get_chat_template(tools=example.tools)
        except ValueError as error:  # several templates without a default
            raise ConfigError(
                f"{self.where}: no chat template is for these messages ({error}); give one with "
                "--chat-template FILE"
            ) from error
        self._check_tools(example)
        self.messages = fit_template(example.messages, self.text)

    def _check_tools(self, example: Chat) -> None:
        """Refuse a template that does not mention tools or their calls: it would silently leave
        them out."""
        given = {
            "tools": bool(example.tools),
            "tool_calls": any(message.get("tool_calls") for message in example.messages),
        }
        for name, there in given.items():
            if there and name not in self._template:
                raise ConfigError(
                    f"{self.where}: the chat template does not support {name}; give one that does "
                    "with --chat-template FILE"
                )

    @property
    def marks(self) -> bool:
        """Whether the template marks the text of the model with {% generation %}."""
        return _MARKS.search(self._template) is not None

    def text(self, messages: Sequence[Message], opens_turn: bool = False) -> str:
        return self._render(messages, add_generation_prompt=opens_turn)[0]

    def marked(self) -> tuple[str, list[Span]]:
        """The text of the example, and the spans that the template marks."""
        return self._render(self.messages, return_assistant_tokens_mask=True)

    def _render(self, messages: Sequence[Message], **options: bool) -> tuple[str, list[Span]]:
        # as apply_chat_template, which would return tokens instead of the spans
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._tokenizer.special_tokens_map, **options}
        try:
            texts, spans = render_jinja_template(
                [list(messages)], self._tools, chat_template=self._template, **variables
            )
        except Exception as error:  # jinja and templates raise any type
            raise ConfigError(
                f"{self.where}: the chat template refuses these messages ({error})"
            ) from error
        return texts[0], spans[0] if spans else []


def _find_answers(renderer: _Renderer) -> tuple[str, list[Span]]:
    """The text of an example, and the spans of the assistant's messages in it."""
    text = renderer.text(renderer.messages)
    spans = [
        _find_answer(renderer, number, text)
        for number, message in enumerate(renderer.messages)
        if message["role"] == "assistant"
    ]
    return text, spans


def _find_answer(renderer: _Renderer, number: int, text: str) -> Span:
    """The span of message `number` in `text`: from the generation prompt, or if there is none from
    the content, to the end of the turn."""
    start, end = _prompt_end(renderer, number, text), None
    around = _around(renderer, number, text)
    if around is not None and text.endswith(around.after):
        content_end = len(text) - len(around.after)
        if start is None and text.startswith(around.before):
            start = len(around.before)
        if start is not None and start <= content_end:
            # an end marker that only the last turn has does not belong to this one
            ends_alike = around.after.startswith(around.closing)
            end = content_end + (len(around.closing) if ends_alike else 0)
    else:  # text after the content depends on it: a call of a tool before its result, for example
        ended = renderer.text(renderer.messages[: number + 1])
        end = len(ended) if text.startswith(ended) else None
    if start is None or end is None or start > end:
        raise ConfigError(
            f"{renderer.where}: the answer in message {number + 1} cannot be located in "
            "the text that the chat template renders; mark answers with {% generation %} in a "
            "template given with --chat-template, or correct the line"
        )
    return start, end


def _prompt_end(renderer: _Renderer, number: int, text: str) -> int | None:
    """The end of the generation prompt of message `number`; None if `text` has none there."""
    earlier = renderer.messages[:number]
    if not earlier:
        return None
    prompt = renderer.text(earlier, opens_turn=True)
    opened = text.startswith(prompt) and prompt != renderer.text(earlier)
    return len(prompt) if opened else None


class _Around(NamedTuple):
    """The text around the content of a message."""

    before: str
    after: str
    closing: str
    """The text after the content if no message follows."""


def _around(renderer: _Renderer, number: int, text: str) -> _Around | None:
    """The text around the content of message `number`, found with a sentinel in place of the
    content; None if the template does not render the sentinel once."""
    messages = renderer.messages
    own = {key: value for key, value in messages[number].items() if key not in _BESIDE_CONTENT}
    # changing case and stripping spaces keeps digits; it cannot overlap with itself
    sentinels = ("1" + "0" * zeros + "2" for zeros in itertools.count(12))
    sentinel = next(each for each in sentinels if each not in text)
    turns = [*messages[:number], {**own, "content": sentinel}]
    try:
        parts = renderer.text([*turns, *messages[number + 1 :]]).split(sentinel)
        closings = renderer.text(turns).split(sentinel)
    except ConfigError:  # a template may refuse the result of a tool without its call
        return None
    if len(parts) != 2 or len(closings) != 2:
        return None
    return _Around(parts[0], parts[1], closings[1])
