"""README and docs: code and commands run; links, flags and tables are correct."""

import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from overspill.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["opt"].steps_taken == 3
    names["model"].overspill.close()


def test_the_fine_tuning_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.split("## Fine-tune Mixtral")[1]
    (block,) = re.findall(r"```bash\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for line in block.replace("\\\n", " ").strip().splitlines():
        program, *words = shlex.split(line)
        if program == "python":
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        else:
            assert program == "overspill"
            assert app(words) == 0
    assert (tmp_path / "runs/full/final/model.safetensors.index.json").is_file()
    assert (tmp_path / "runs/lora/final/adapter_model.safetensors").is_file()


def test_the_commands_for_serving_and_pre_gates_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("a question\n"))
    monkeypatch.setattr("overspill.train.data._STDLIB_BYTES", 1 << 18)  # one is enough
    lines: list[str] = []
    for name in ("Serve", "Pre-gates"):
        section = README.split(f"## {name}\n")[1].split("\n## ")[0]
        (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
        lines += block.strip().splitlines()
    assert lines[0] == lines[3]  # both sections begin with the same run
    for line in dict.fromkeys(lines):
        program, *words = shlex.split(line.replace("--steps 20", "--steps 1"))
        assert program == "overspill"
        few = ["--max-tokens", "8"] if words[0] in ("generate", "chat") else []
        if words[0] == "train":
            few = ["--d-model", "32", "--d-hidden", "32", "--heads", "2", "--seq-len", "64"]
            few += ["--layers", "4", "--eval-every", "0"]
        assert app([*words, *few]) == 0
    assert (tmp_path / "runs/pregated/final/pregates.safetensors").is_file()
    for code in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL
    ):
        exec(compile(code, "docs/serving.md", "exec"), {})


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
    ],
)
def test_the_tables_match_the_records(page: str) -> None:
    command = [sys.executable, "bench/tables.py", "--check", page]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_the_structure_page_names_every_file() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    files = [path for path in (ROOT / "src" / "overspill").rglob("*.py") if path.stem != "__init__"]
    missing = [f"{p.parent.name}/{p.stem}" for p in files if not re.search(rf"\b{p.stem}\b", page)]
    assert not missing
