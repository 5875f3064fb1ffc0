"""README and docs: code and commands run; links, flags and tables are correct."""

import ast
import io
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from overspill.cli.main import app, commands
from overspill.train.config import TrainConfig
from overspill.train.finetune.config import FinetuneConfig, PregateConfig
from overspill.train.metrics import read_lines
from tests.docs.readme import README, ROOT, blocks, run

_WORDS_OF_GPUS = re.compile(r"gpu|pcie|cuda", re.IGNORECASE)
"""A run on a CPU has nothing to say about them."""
DOCS = sorted((ROOT / "docs").glob("*.md"))


def test_the_example_runs() -> None:
    (code,) = (block.text for block in blocks() if block.language == "python")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["opt"].steps_taken == 3
    names["model"].overspill.close()


def test_the_fine_tuning_commands_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("a question\n"))
    for program, *words in _section("Fine-tune"):
        if program == "python":
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
            continue
        assert program == "overspill"
        few = ["--max-tokens", "8"] if words[0] in ("chat", "generate") else []
        if words[0] == "finetune" and "--lora" not in words:
            few = ["--steps", "16"]  # fewer show it too
        assert app([*words, *few]) == 0
        if words[0] == "finetune":
            assert int(words[words.index("--steps") + 1]) >= 20
            lines = read_lines(Path(words[words.index("--out") + 1]) / "metrics.jsonl")
            losses = [line["loss"] for line in lines if "loss" in line]
            assert losses[-1] < losses[0]
    assert not _WORDS_OF_GPUS.search(capsys.readouterr().out)
    assert (tmp_path / "runs/full/final/model.safetensors.index.json").is_file()
    assert (tmp_path / "runs/lora/final/adapter_model.safetensors").is_file()


def test_the_commands_for_serving_and_pre_gates_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("a question\n"))
    monkeypatch.setattr("overspill.train.data._STDLIB_BYTES", 1 << 18)  # one is enough
    small = "--steps 1 --d-model 32 --d-hidden 32 --heads 2 --seq-len 64 --layers 4 --eval-every 0"
    assert app(["train", "nano", *small.split(), "--out", "runs/nano"]) == 0  # as make train does
    said = capsys.readouterr().out.replace("--gpu-memory", "")
    assert "compute" in said
    assert not _WORDS_OF_GPUS.search(said)
    for program, *words in [*_section("Serve"), *_section("Pre-gates")]:
        if program != "overspill" or words[0] == "serve":
            continue
        few = ["--max-tokens", "8"] if words[0] in ("generate", "chat") else ["--steps", "1"]
        assert app([*words, *few]) == 0
    assert (tmp_path / "runs/pregated/final/pregates.safetensors").is_file()
    for code in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL
    ):
        exec(compile(code, "docs/serving.md", "exec"), {})


def _section(name: str) -> list[list[str]]:
    """The commands of a section that run on any machine."""
    section = README.split(f"## {name}\n")[1].split("\n## ")[0]
    found = [block for block in blocks(section) if block.language == "bash"]
    return [shlex.split(command) for block in found for command in block.commands]


# -- followed literally ---------------------------------------------------------------------------


def test_every_command_is_there_when_the_reader_gets_to_it() -> None:
    """The programs that a clone of the repository has, and those that a command has installed."""
    programs = {"make", "source", "python3"}
    for command in _literal_commands():
        program, *words = shlex.split(command)
        assert program in programs, f"{command}: {program} is not there yet"
        if program == "make":
            programs.add(".venv")
        if (program, words) == ("source", [".venv/bin/activate"]):
            assert ".venv" in programs
            programs |= {"overspill", "python", "pip", "curl"}


def test_every_file_is_there_when_a_command_reads_it() -> None:
    made: set[str] = set()
    for command in _literal_commands():
        words = shlex.split(command)
        for name in _files_read(words):
            there = (ROOT / name).exists() or any(
                name == one or name.startswith(f"{one}/") for one in made
            )
            assert there, f"{command}: {name} does not exist"
        new = _files_made(words)
        again = made & new if "--resume" not in words else set()
        assert not again, f"{command}: {again} is there already"
        made |= new


def test_files_that_the_reader_must_have_are_named_before_the_commands() -> None:
    for block in blocks():
        if block.language != "sh":
            continue
        for command in block.commands:
            words = shlex.split(command)
            for name in {*_files_read(words), *_value(words, "--disk")}:
                known = re.escape(name.split("/spill")[0].rstrip("/"))
                hub = re.fullmatch(r"[A-Za-z]+/[A-Za-z0-9.-]+", name) and "/" in name
                assert hub or re.search(rf"`{known}/?`", block.before), f"{command}: {name}"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in DOCS)])
def test_the_command_line_accepts_every_command(page: str) -> None:
    root: Any = typer.main.get_command(commands)
    for block in blocks((ROOT / page).read_text()):
        if block.language == "bash" and "bench/" in block.text:
            continue  # those of benchmarks have programs of their own
        for command in block.commands if block.language in ("bash", "sh") else []:
            program, *words = shlex.split(command)
            if program != "overspill":
                continue
            name, *rest = words
            context = root.commands[name].make_context(name, rest)
            kind = {"train": TrainConfig, "finetune": FinetuneConfig, "pregate": PregateConfig}
            if name in kind:
                given = {n: v for n, v in context.params.items() if v not in (None, [], ())}
                given.pop("as_json", None)
                source = given.pop("source", "nano")
                kind[name].make({"preset": source} if name == "train" else {}, given)


def test_installation_commands_name_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    sources = [*(ROOT / "src").rglob("*.py"), *DOCS, ROOT / "README.md"]
    for path in sources:
        text = path.read_text()
        assert not re.search(r"pip install [\"']?overspill", text), f"{path}: on no index"
        for named in re.findall(r"'\.\[([a-z,]+)\]'", text):
            assert {*named.split(",")} <= {*extras}, path
    assert "peft" in str(extras["lora"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_commands_run_in_a_new_clone(tmp_path: Path) -> None:
    """With fewer steps, an empty home, and the packages of this environment instead of pip's."""
    done = run(tmp_path / "first hour", full=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.endswith("all commands ran\n")


def _literal_commands() -> list[str]:
    return [c for block in blocks() if block.language == "bash" for c in block.commands]


def _files_read(words: Sequence[str]) -> set[str]:
    """Files and folders that a command needs."""
    program, *rest = words
    if program == "python":
        return {rest[0]}
    if program != "overspill" or "--resume" in rest:
        return {*_value(rest, "--out")} if program == "overspill" else set()
    name, *rest = rest
    positional = [
        w for n, w in enumerate(rest) if w[0] != "-" and (n == 0 or rest[n - 1][0] != "-")
    ]
    read = {"train": [], "finetune": positional, "pregate": positional}.get(name, positional[:1])
    return {*read, *_value(rest, "--data")} - {"stdlib"}


def _files_made(words: Sequence[str]) -> set[str]:
    if words[:2] == ["make", "train"]:
        return {"runs/nano"}
    if words[0] == "python":
        return {words[2]}
    if words[:2] in (["overspill", "export"], ["overspill", "merge"]):
        return {*words[3:4]}
    return {*_value(words, "--out")}


def _value(words: Sequence[str], flag: str) -> list[str]:
    return [words[words.index(flag) + 1]] if flag in words else []


def test_all_links_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
        missing = [link for link in links if not (page.parent / link).exists()]
        assert not missing, f"{page.name} links to missing {missing}"


def test_all_flags_of_training_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    known = set(re.findall(r"--[a-z0-9-]+", shown)) | {"--experts"}
    text = README + (ROOT / "docs" / "training.md").read_text()
    lines = [line for line in text.splitlines() if "overspill train" in line]
    named = {flag for line in lines for flag in re.findall(r"--[a-z0-9-]+", line)}
    assert named - {"--help"} <= known


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/benchmarks.md",
        "docs/finetuning.md",
        "docs/multi-gpu.md",
        "docs/pre-gates.md",
        "docs/quantized.md",
    ],
)
def test_the_tables_match_the_records(page: str) -> None:
    command = [sys.executable, "bench/tables.py", "--check", page]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_the_structure_page_names_every_file() -> None:
    """In the row of its package, and no file that does not exist."""
    source = ROOT / "src" / "overspill"
    table = (ROOT / "docs" / "structure.md").read_text().split("| package | file |")[1]
    named: dict[str, set[str]] = {}
    package = ""
    for row in re.findall(r"^\| ([a-z/]*) ?\| (.+?) \| ", table.split("\n## ")[0], re.MULTILINE):
        package = row[0] or package
        names = re.sub(r" \(.*?\)", "", row[1]).split(", ")
        named.setdefault(package, set()).update(names)
    files: dict[str, set[str]] = {}
    for path in source.rglob("*/*.py"):
        if path.stem != "__init__":
            files.setdefault(str(path.parent.relative_to(source)), set()).add(path.stem)
    assert named == files


def test_the_journeys_of_the_structure_page_pass_functions_that_exist() -> None:
    """Each line names at least one function with its file."""
    source, names = ROOT / "src" / "overspill", dict[str, set[str]]()
    page = (ROOT / "docs" / "structure.md").read_text()
    assert len(page.splitlines()) <= 200
    steps = re.findall(r"^\d+\. .+", page, re.MULTILINE)
    for step in steps:
        passed = re.findall(r"`([\w/]+\.(?:py|cpp|h))` `([\w.]+)`", step)
        assert passed, step
        for file, name in passed:
            text = (source / file).read_text()
            if file not in names:
                names[file] = {*_definitions(text)} if file.endswith(".py") else set()
            native = not file.endswith(".py") and re.search(rf"\b{name}\(", text) is not None
            assert native or name in names[file], f"{file} has no {name}"
    assert len(re.findall(r"^1\. ", page, re.MULTILINE)) == 4


def _definitions(text: str) -> Iterator[str]:
    """The functions and classes of a file, and the methods of its classes with their classes."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{part.name}"
