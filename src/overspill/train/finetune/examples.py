"""Reads examples from data files. Each example keeps its file and line for error messages.

A .jsonl file holds one kind of example, determined by the keys of its first line; a .tsv file holds
sentences and labels; other text is divided into examples of whole lines. Names of compressed files
end in .gz.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from overspill.core.errors import ConfigError
from overspill.core.json_text import parse_json
from overspill.train.data import PLAIN_TEXT, STDLIB, find_files, read_blocks

_ENDINGS = (".jsonl", ".jsonl.gz", ".tsv", ".tsv.gz")
_SUPPORTED = f"{', '.join(_ENDINGS)}; or those of plain text: {' '.join(sorted(PLAIN_TEXT))}"
_BLOCK_CHARS = 1 << 12
_HEADER = ["sentence", "label"]
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


@dataclass(frozen=True)
class Chat(Example):
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class Labelled(Example):
    sentence: str
    label: str
    """As in the file."""


class Kind(Enum):
    """Kinds of examples; the value describes the format of a line in error messages."""

    TEXT = 'a JSON object with a string "text"'
    PAIR = 'a JSON object with the strings "prompt" and "completion"'
    CHAT = 'a JSON object with a list "messages" of objects with "role" and "content"'
    LABELLED = "a sentence, a tab and a label"

    @property
    def description(self) -> str:
        """Of data that may have another format."""
        return "text" if self is Kind.TEXT else self.value


@dataclass(frozen=True)
class Examples:
    kind: Kind
    items: Sequence[Example]
    text_files: Sequence[Path] = ()
    """Those of plain text."""


def read_examples(sources: Sequence[str], flag: str = "DATA", kind: Kind | None = None) -> Examples:
    """All examples in files and folders, of `kind` or of the kind of the first line."""
    items: list[Example] = []
    texts: list[Path] = []
    known = set(find_files(STDLIB)) if STDLIB in sources else set()  # as in `overspill train`
    for file in find_examples(sources, flag):
        if _is_text(file):
            texts.append(file)
            for where, block in _blocks(file, flag, "replace" if file in known else "strict"):
                kind = _same(kind, Kind.TEXT, where)
                items.append(Text(where, block))
            continue
        for where, line in _lines(file, flag):
            if _is_table(file):
                kind = _same(kind, Kind.LABELLED, where)
                items.append(_parse_labelled(line, where))
            else:
                content = _parse_json(line, where, kind)
                kind = kind or _kind_of(content, where)
                items.append(_parse(content, kind, where))
    if kind is None or not items:
        raise ConfigError(f"{flag} {' '.join(sources)} has no examples; give another file")
    return Examples(kind, items, texts)


def find_examples(sources: Sequence[str], flag: str = "DATA") -> list[Path]:
    """The files of `sources`: of a folder its .jsonl and .tsv files, or its text files if it has
    none of them."""
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if source == STDLIB and not path.exists():
            files += find_files(STDLIB)
        elif source == STDLIB:
            raise ConfigError(
                f"{flag} {source} stands for the sources of Python's standard library, and is the "
                f"name of {path.absolute()}; write ./{source} for that"
            )
        elif path.is_dir():
            every = [file for file in sorted(path.rglob("*")) if not file.is_dir()]
            found = [file for file in every if file.name.endswith(_ENDINGS)]
            found = found or [file for file in every if _is_text(file) and not _hidden(file, path)]
            if not found:
                raise ConfigError(
                    f"{flag} {source} has no data file; supported endings are {_SUPPORTED}"
                )
            files += found
        elif not path.is_file():
            raise ConfigError(
                f"{flag} {source} does not exist; give a .jsonl, .tsv or text file, a folder, or "
                f'"{STDLIB}" for the sources of Python\'s standard library'
            )
        elif not (path.name.endswith(_ENDINGS) or _is_text(path)):
            raise ConfigError(
                f"{flag} {source}: unsupported ending; rename it to one of {_SUPPORTED}"
            )
        else:
            files.append(path)
    return files


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _is_text(file: Path) -> bool:
    return Path(file.name.lower().removesuffix(".gz")).suffix in PLAIN_TEXT


def _blocks(file: Path, flag: str, errors: str) -> Iterator[tuple[str, str]]:
    """Pieces of plain text that are not empty, with their location."""
    line = 1
    for block in read_blocks(file, _BLOCK_CHARS, flag, errors):
        if block.strip():
            yield f"{file}:{line}", block
        line += block.count("\n")


def _is_table(file: Path) -> bool:
    return file.name.endswith((".tsv", ".tsv.gz"))


def _lines(file: Path, flag: str) -> Iterator[tuple[str, str]]:
    """The non-empty lines of a file with their location, without the header of a .tsv."""
    opener: Any = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rb") as handle:
            for number, content in enumerate(handle, start=1):
                where = f"{file}:{number}"
                line = _decode(content, where).rstrip("\r\n")
                line = line.removeprefix("\ufeff") if number == 1 else line  # byte order mark
                if number == 1 and _is_table(file):
                    _check_header(line, where)
                elif line.strip():
                    yield where, line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag} {file} cannot be read ({reason}); check the file") from error


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _expected("UTF-8", f"byte {content[error.start]:#04x}", where) from error


def _check_header(line: str, where: str) -> None:
    if line.split("\t") != _HEADER:
        raise _expected("the header sentence<TAB>label", _short(line), where)


def _parse_labelled(line: str, where: str) -> Labelled:
    cells = line.split("\t")
    if len(cells) != 2:
        raise _expected(Kind.LABELLED.value, f"{len(cells)} columns", where)
    sentence, label = cells[0].strip(), cells[1].strip()
    for name, cell in (("sentence", sentence), ("label", label)):
        if not cell:
            raise _expected(Kind.LABELLED.value, f"an empty {name}", where)
    return Labelled(where, sentence, label)


def _parse_json(line: str, where: str, kind: Kind | None) -> dict[str, Any]:
    wanted = "a JSON object" if kind is None else kind.value
    try:
        content = parse_json(line)
    except ValueError as error:
        raise _expected(wanted, _short(line), where) from error
    if not isinstance(content, dict):
        raise _expected(wanted, _short(line), where)
    return content


def _kind_of(content: dict[str, Any], where: str) -> Kind:
    if "messages" in content:
        return Kind.CHAT
    if "prompt" in content or "completion" in content:
        return Kind.PAIR
    if "text" in content:
        return Kind.TEXT
    wanted = 'a JSON object with "text", with "prompt" and "completion", or with "messages"'
    raise _expected(wanted, _keys(content), where)


def _parse(content: dict[str, Any], kind: Kind, where: str) -> Example:
    if kind is Kind.TEXT:
        return Text(where, _string(content, "text", kind, where))
    if kind is Kind.PAIR:
        prompt = _string(content, "prompt", kind, where)
        return Pair(where, prompt, _string(content, "completion", kind, where))
    if kind is Kind.CHAT:
        return _parse_chat(content, where)
    raise _expected(kind.value, "JSON", where)


def _same(kind: Kind | None, found: Kind, where: str) -> Kind:
    if kind not in (None, found):
        assert kind is not None
        raise _expected(kind.description, found.description, where)
    return found


def _parse_chat(content: dict[str, Any], where: str) -> Chat:
    if "messages" not in content:
        raise _expected(Kind.CHAT.value, _keys(content), where)
    messages = content["messages"]
    if not isinstance(messages, list):
        raise _expected(Kind.CHAT.value, f'"messages" = {_short(messages)}', where)
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise _expected(Kind.CHAT.value, f"message {number} = {_short(message)}", where)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = f"message {number} without a string {key!r}"
                raise _expected(Kind.CHAT.value, found, where)
            _check_unicode(message[key], f"{key!r} of message {number}", where)
    if not any(message["role"] == "assistant" for message in messages):
        raise _expected('a message of the role "assistant" to learn from', "none", where)
    return Chat(where, messages)


def _string(content: dict[str, Any], key: str, kind: Kind, where: str) -> str:
    if key not in content:
        raise _expected(kind.value, _keys(content), where)
    value = content[key]
    if not isinstance(value, str):
        raise _expected(kind.value, f'"{key}" = {_short(value)}', where)
    if not value:
        raise _expected(kind.value, f'an empty "{key}"', where)
    _check_unicode(value, f'"{key}"', where)
    return value


def _check_unicode(text: str, field: str, where: str) -> None:
    """JSON can escape half of a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: {field} contains the lone surrogate U+{ord(text[error.start]):04X}; remove "
            "or replace it"
        ) from error


def _expected(wanted: str, found: str, where: str) -> ConfigError:
    return ConfigError(f"{where}: expected {wanted}, found {found}")


def _keys(content: dict[str, Any]) -> str:
    names = ", ".join(f'"{key}"' for key in content)
    return "an object with " + shorten_text(names) if names else "an empty object"


def _short(value: Any) -> str:
    if isinstance(value, str):
        return repr(shorten_text(value))
    try:
        return shorten_text(json.dumps(value))
    except RecursionError:  # reading nested values takes less of Python's stack
        return "deeply nested JSON"


def shorten_text(text: str) -> str:
    """The beginning of a text, for an error message."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
