"""Reads examples from data files. Each example keeps its file and line for error messages.

A .jsonl file holds one kind of example, determined by the keys of its first line; a .tsv file holds
sentences and labels; other text is divided into examples of whole lines. Names of compressed files
end in .gz.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.core.errors import ConfigError
from overspill.train.data import PLAIN_TEXT, STDLIB, find_files, read_blocks
from overspill.train.finetune.json_lines import parse_line
from overspill.train.finetune.kinds import Example, Kind, Labelled, Text, expected, short

_ENDINGS = (".jsonl", ".jsonl.gz", ".tsv", ".tsv.gz")
_SUPPORTED = f"{', '.join(_ENDINGS)}; or those of plain text: {' '.join(sorted(PLAIN_TEXT))}"
_SPLIT = (
    'python -c "import json; '
    "[print(json.dumps(row)) for row in json.load(open('{0}', encoding='utf-8-sig'))]\" > {0}l"
)
_BLOCK_CHARS = 1 << 12
_HEADER = ["sentence", "label"]


@dataclass(frozen=True)
class Examples:
    kind: Kind
    items: Sequence[Example]
    text_files: Sequence[Path] = ()
    """Files of plain text."""


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
                kind, example = parse_line(line, where, kind)
                items.append(example)
    if kind is None or not items:
        raise ConfigError(f"{flag} {' '.join(sources)} has no examples; give another file")
    return Examples(kind, items, texts)


def find_examples(sources: Sequence[str], flag: str = "DATA") -> list[Path]:
    """The files of `sources`. Of a folder: its .jsonl and .tsv files, or its text files if there
    are none."""
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
            advice = f"rename it to one of {_SUPPORTED}"
            if path.suffix == ".json":
                advice = (
                    f"write each of its rows as a line of a .jsonl file: {_SPLIT.format(source)}"
                )
            raise ConfigError(f"{flag} {source}: unsupported ending; {advice}")
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
        raise expected("UTF-8", f"byte {content[error.start]:#04x}", where) from error


def _check_header(line: str, where: str) -> None:
    if line.split("\t") != _HEADER:
        raise expected("the header sentence<TAB>label", short(line), where)


def _parse_labelled(line: str, where: str) -> Labelled:
    cells = line.split("\t")
    if len(cells) != 2:
        raise expected(Kind.LABELLED.value, f"{len(cells)} columns", where)
    sentence, label = cells[0].strip(), cells[1].strip()
    for name, cell in (("sentence", sentence), ("label", label)):
        if not cell:
            raise expected(Kind.LABELLED.value, f"an empty {name}", where)
    return Labelled(where, sentence, label)


def _same(kind: Kind | None, found: Kind, where: str) -> Kind:
    if kind not in (None, found):
        assert kind is not None
        raise expected(kind.description, found.description, where)
    return found
