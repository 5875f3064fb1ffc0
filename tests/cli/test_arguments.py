"""Completion by the shell, as bash asks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from overspill.cli.arguments import complete_model, complete_preset
from overspill.cli.main import app

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs, a fine-tuning with its final adapter, a checkpoint, and other folders."""
    for name in ("runs/nano/checkpoints", "runs/big/checkpoints", "runs/tuned/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/tuned/final", "mixtral", "docs", ".hidden", "runs/empty"):
        (tmp_path / name).mkdir()
    for name in ("runs/nano", "runs/big", "runs/tuned", "mixtral", "docs"):
        (tmp_path / name / "config.json").touch()
    (tmp_path / "runs/tuned/final/adapter_config.json").touch()
    for name in ("mixtral", ".hidden"):
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "docs/files/q").mkdir(parents=True)
    for name in ("docs/files/q/qwen.gguf", "docs/files/moe.gguf"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


RUNS = ["runs/big", "runs/nano", "runs/tuned"]


@pytest.mark.parametrize(
    ("begun", "found"),
    [
        ("", ["mixtral", *RUNS]),
        ("ru", RUNS),
        ("runs/", RUNS),
        ("runs/n", ["runs/nano"]),
        ("runs/tuned/", ["runs/tuned/final"]),
        ("./mix", ["./mixtral"]),
        ("mixtral", ["mixtral"]),
        ("docs", []),
        ("docs/files/", ["docs/files/moe.gguf", "docs/files/q"]),
        ("docs/files/q/q", ["docs/files/q/qwen.gguf"]),
        ("nowhere/", []),
        ("runs/nano/config.json/", []),
        ("\0", []),
    ],
)
def test_folders_with_a_model_complete_its_name(begun: str, found: list[str]) -> None:
    assert complete_model(begun) == found


def test_a_path_from_the_root_is_completed(tmp_path: Path) -> None:
    assert complete_model(f"{tmp_path}/mi") == [f"{tmp_path}/mixtral"]


def test_folders_that_cannot_be_read_complete_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert complete_model("") == []


def test_presets_begin_as_typed() -> None:
    assert complete_preset("moe-") == ["moe-s", "moe-m", "moe-l", "moe-xl"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("overspill cha", ["chat"]),
        ("overspill chat runs/n", ["runs/nano"]),
        ("overspill generate m", ["mixtral"]),
        ("overspill serve runs/b", ["runs/big"]),
        ("overspill export runs/n", ["runs/nano"]),
        ("overspill finetune mix", ["mixtral"]),
        ("overspill train na", ["nano"]),
        ("overspill chat mixtral --mode gp", ["gpu-only"]),
        ("overspill chat mixtral --max-b", ["--max-batch"]),
    ],
)
def test_bash_completes(
    words: str,
    found: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("_OVERSPILL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        app([])
    assert capsys.readouterr().out.split() == found


def test_completion_is_fast_since_nothing_large_is_imported() -> None:
    """In one process for both words."""
    code = (
        "import os, sys\n"
        "for words in ('overspill chat r', 'overspill train '):\n"
        "    os.environ['COMP_WORDS'] = words\n"
        "    try:\n"
        "        from overspill.cli.main import app\n"
        "        app([])\n"
        "    except SystemExit:\n"
        "        assert not {'torch', 'numpy', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "    print('--', flush=True)\n"
    )
    asked = {"_OVERSPILL_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "src"), **asked},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    found = [part.split() for part in done.stdout.split(b"--")]
    assert b"runs/nano" in found[0]
    assert b"moe-s" in found[1]


def test_the_script_for_the_shell_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    with pytest.raises(SystemExit):
        app(["--show-completion", "zsh"])
    assert "#compdef overspill" in capsys.readouterr().out
