"""Kinds of examples, and errors that name their file and line."""

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from overspill.core.errors import ConfigError

_SHOWN = 40


@dataclass(frozen=True)
class Example:
    where: str
    """file:line"""


@dataclass(frozen=True)
class Text(Example):
    text: str


@dataclass(frozen=True)
class Pair(Example):
    prompt: str
    completion: str
    """The answer that is learned."""
    answers: tuple[str, ...] = ()
    """All right answers, if the example lists them."""

    @property
    def references(self) -> tuple[str, ...]:
        """Reference texts for a generated answer."""
        return self.answers or (self.completion,)


@dataclass(frozen=True)
class Chat(Example):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Instruction(Example):
    """A row of Alpaca."""

    instruction: str
    input: str
    output: str


@dataclass(frozen=True)
class Labelled(Example):
    sentence: str
    label: str
    """The label, as the file has it."""


class Kind(Enum):
    """Kinds of examples; the value describes the format of a line in error messages."""

    TEXT = 'a JSON object with a string "text"'
    PAIR = 'a JSON object with "prompt" and "answers", or the strings "prompt" and "completion"'
    CHAT = 'a JSON object with a list "messages" of objects with "role" and "content"'
    INSTRUCTION = 'a JSON object with the strings "instruction" and "output"'
    LABELLED = "a sentence, a tab and a label"

    @property
    def description(self) -> str:
        """Description of data that may have another format."""
        return "text" if self is Kind.TEXT else self.value


def expected(wanted: str, found: str, where: str) -> ConfigError:
    return ConfigError(f"{where}: expected {wanted}, found {found}")


def keys(content: dict[str, Any]) -> str:
    names = ", ".join(f'"{key}"' for key in content)
    return "an object with " + shorten_text(names) if names else "an empty object"


def short(value: Any) -> str:
    if isinstance(value, str):
        return repr(shorten_text(value))
    try:
        return shorten_text(json.dumps(value))
    except RecursionError:  # reading nested values takes less of Python's stack
        return "deeply nested JSON"


def shorten_text(text: str) -> str:
    """The beginning of a text, for an error message."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def check_unicode(text: str, field: str, where: str) -> None:
    """Raise for half of a surrogate pair: JSON can escape it, and no tokenizer accepts it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: {field} contains the lone surrogate U+{ord(text[error.start]):04X}; remove "
            "or replace it"
        ) from error
