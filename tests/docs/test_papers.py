"""docs/papers.md: what it names exists, and all that the papers number has a row."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from overspill.cli.main import commands
from overspill.models.checkpoint_presets import summaries
from overspill.server.settings import ServerConfig
from overspill.train.config import TrainConfig
from overspill.train.finetune.config import PregateConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text()

NUMBERED: dict[str, dict[str, list[str]]] = {
    "Pre-gated MoE": {"Figure": [*map(str, range(1, 17))], "Table": ["1", "2"], "Equation": ["1"]},
    "APTMoE": {"Figure": [*map(str, range(1, 17))], "Table": ["I"], "Equation": ["1", "2"]},
    "ES-MoE": {"Figure": [*map(str, range(1, 8))], "Table": [*map(str, range(1, 7))]},
    "MPipeMoE": {
        "Figure": [*map(str, range(1, 14))],
        "Table": ["I", "II", "III"],
        "Equation": [*map(str, range(1, 11))],
        "Algorithm": ["1"],
    },
}
"""What each paper numbers."""


class Row(NamedTuple):
    paper: str
    what: str
    where: str
    record: str
    differs: str


def _rows() -> Iterator[Row]:
    for section in PAGE.split("\n## ")[1:]:
        paper, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("|")]
        for line in lines[2:]:  # below the heads
            what, where, record, differs = (cell.strip() for cell in line[1:-1].split("|"))
            yield Row(paper, what, where, record, differs)


ROWS = [*_rows()]
COMMANDS: dict[str, Any] = typer.main.get_command(commands).commands  # type: ignore[attr-defined]
PRESETS = {each.name for each in summaries()}
CHOICES: dict[str, set[str]] = {}
"""Values of flags that have a few, of all commands together."""
for _config in (TrainConfig, PregateConfig, ServerConfig):
    for _setting in _config.settings():
        if _setting.choices:
            CHOICES.setdefault(_setting.flag, set()).update(_setting.choices)


@pytest.mark.parametrize("paper", NUMBERED)
def test_all_that_a_paper_numbers_has_one_row(paper: str) -> None:
    heads = [re.match(r"\*\*(\w+) (\w+)\*\*:", row.what) for row in ROWS if row.paper == paper]
    found = [(head[1], head[2]) for head in heads if head]
    expected = [(kind, number) for kind, all_ in NUMBERED[paper].items() for number in all_]
    assert sorted(found) == sorted(expected)


def test_what_it_names_exists() -> None:
    """In a cell that says where something is or what was measured, each name in backticks; in the
    last one, those that look like such names."""
    assert {row.paper for row in ROWS} == {*NUMBERED}
    problems = []
    for row in ROWS:
        wheres, records, others = (_names(cell) for cell in row[2:])
        found = [_problem_of_place(name) for name in wheres]
        found += [_problem_of_record(name) for name in records]
        found += [_problem_of_place(name) for name in others if _is_place(name)]
        found += [_problem_of_record(name) for name in others if _is_record(name)]
        if not wheres and row.where != "not built":
            found.append("it names neither a place nor 'not built'")
        if not records and row.record not in ("no record", "–"):
            found.append("it names neither a record nor 'no record'")
        problems += [f"{row.paper}, {row.what}: {problem}" for problem in found if problem]
    assert not problems, "\n".join(problems)


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _is_call(name: str) -> bool:
    return name.startswith("bench/") and " " in name


def _is_place(name: str) -> bool:
    starts = name.startswith(("--", "overspill ", "overspill."))
    return starts or ("/" in name and not _is_call(name))


def _is_record(name: str) -> bool:
    words = re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)+", name)
    return _is_call(name) or (words is not None and name not in PRESETS)


def _problem_of_record(name: str) -> str | None:
    if name.startswith("bench/"):
        return _problem_of_script(name)
    exists = (ROOT / "bench" / "results" / f"{name}.json").is_file()
    return None if exists else f"there is no record {name}"


def _problem_of_script(call: str) -> str | None:
    """`bench/script.py word --flag value`: the script has the words and flags."""
    path, *words = call.split()
    if not (ROOT / path).is_file():
        return f"{path} does not exist"
    source = (ROOT / path).read_text()
    values = {after for word, after in pairwise(words) if word.startswith("--")}
    unknown = [word for word in words if word not in values and f'"{word}"' not in source]
    return f"{path} has no {unknown}" if unknown else None


def _problem_of_place(name: str) -> str | None:
    if name.startswith("--"):
        problems = {_problem_of_flags(command, name) for command in COMMANDS.values()}
        return None if None in problems else " or ".join(sorted(map(str, problems)))
    if name.startswith("overspill "):
        _, command, *words = name.split()
        if command not in COMMANDS:
            return f"there is no command {command}"
        if command in ("train", "create") and words and words[0] not in PRESETS:
            return f"there is no preset {words[0]}"
        return _problem_of_flags(COMMANDS[command], " ".join(words))
    if name.startswith("overspill."):
        return _problem_of_api(name)
    return _problem_of_file(name)


def _problem_of_flags(command: Any, text: str) -> str | None:
    flags = {flag for each in command.params for flag in each.opts + each.secondary_opts}
    for flag, value in re.findall(r"(--[a-z-]+)(?: ([^-\s]\S*))?", text):
        if flag not in flags:
            return f"there is no flag {flag}"
        if value and flag in CHOICES and value not in CHOICES[flag]:
            return f"{flag} has no value {value}"
    return None


def _problem_of_api(name: str) -> str | None:
    """`overspill.name` or `overspill.name(argument=value)`."""
    tree = ast.parse(name, mode="eval").body
    call = tree if isinstance(tree, ast.Call) else None
    path = ast.unparse(tree if call is None else call.func).split(".")
    found: Any = importlib.import_module(path[0])
    for part in path[1:]:
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except ImportError:
                return f"{name} does not exist"
        found = getattr(found, part)
    if call is not None:
        known = inspect.signature(found).parameters
        unknown = [each.arg for each in call.keywords if each.arg not in known]
        if unknown:
            return f"{name}: there is no argument {unknown}"
    return None


def _problem_of_file(name: str) -> str | None:
    """`path` or `path:name`; a path is that of the repository or of the package."""
    path, _, defined = name.partition(":")
    files = [base / path for base in (ROOT, ROOT / "src" / "overspill") if (base / path).is_file()]
    if not files:
        return f"{path} does not exist"
    pattern = rf"^\s*(?:def |class )?{re.escape(defined)}\b"
    if defined and not re.search(pattern, files[0].read_text(), re.MULTILINE):
        return f"{path} does not define {defined}"
    return None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("serve/decode/modes.py", None),
        ("serve/decode/modes.py:Lookbehind", "does not define"),
        ("serve/decode/mode.py", "does not exist"),
        ("--migrate copy", None),
        ("--migrate move", "no value"),
        ("--migration", "no flag"),
        ("overspill pregate --level 1", None),
        ("overspill train nano --level 1", "no flag"),
        ("overspill create switch-base-9", "no preset"),
        ("overspill.LLM(slots=0)", None),
        ("overspill.LLM(slot=0)", "no argument"),
        ("overspill.simulate.Drawn", "does not exist"),
    ],
)
def test_names_that_do_not_exist_are_found(name: str, problem: str | None) -> None:
    found = _problem_of_place(name)
    assert found is None if problem is None else problem in (found or "")


def test_records_and_scripts_that_do_not_exist_are_found() -> None:
    assert _problem_of_record("pregate-memory") is None
    assert "no record" in (_problem_of_record("pregate-memories") or "")
    assert _problem_of_record("bench/pregate.py memory") is None
    assert "memories" in (_problem_of_record("bench/pregate.py memories") or "")
