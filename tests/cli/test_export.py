import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from overspill.cli.main import app
from tests.train.fakes import tiny_settings


def _train(folder: Path, *more: str) -> Path:
    flags = [
        word
        for name, value in tiny_settings(folder, steps=1).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert app(["train", *flags, *more]) == 0
    return folder / "run"


def test_train_then_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _train(tmp_path)
    capsys.readouterr()
    assert app(["export", str(run), str(tmp_path / "out")]) == 0
    assert f"from_pretrained('{tmp_path / 'out'}')" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_local_experts == 4
    assert app(["export", str(run), str(tmp_path / "two"), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["out"], done["step"]) == (str(tmp_path / "two"), 1)


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["export", "--help"]) == 0
    assert "overspill export runs/nano exported" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _train(tmp_path, "--no-gated")
    for arguments, message in [
        ([str(run), str(tmp_path / "out")], "--gated"),
        ([str(tmp_path / "none"), str(tmp_path / "out")], "is not the folder of a run"),
        ([str(run), str(run)], "already exists"),
        ([str(run)], "OUT"),
    ]:
        capsys.readouterr()
        assert app(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
