import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from overspill.cli.finetune import resolve
from overspill.cli.main import app
from overspill.core.errors import ConfigError
from overspill.train.finetune.config import FinetuneConfig, PregateConfig
from overspill.train.metrics import read_lines
from tests.cli.forks import Forks
from tests.train.finetune.tiny import (
    save_mixtral,
    tiny_settings,
    write_jsonl,
    write_labels,
    write_pairs,
)
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixtral(tmp_path_factory.mktemp("checkpoints") / "tiny-mixtral")


def _arguments(checkpoint: Path, data: Path, out: Path, **changes: Any) -> list[str]:
    return _words(tiny_settings(checkpoint, data, out, **changes))


def _words(chosen: dict[str, Any]) -> list[str]:
    words = ["finetune", chosen.pop("checkpoint"), *chosen.pop("data")]
    for name, value in chosen.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def test_help_shows_every_setting_and_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert app(["finetune", "--help"]) == 0
    text = capsys.readouterr().out
    for setting in FinetuneConfig.settings():
        assert setting.name in ("checkpoint", "data") or setting.flag in text, setting.flag
    assert "overspill finetune OLMoE-1B-7B train.tsv --labels negative,positive" in text
    assert r"{sentence}\nLabel:" in text


def test_pregate_has_the_settings_of_finetune_and_a_level(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app(["pregate", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--level" in text
    assert "overspill pregate runs/nano" in text
    own = {setting.name for setting in PregateConfig.settings()}
    assert own == {setting.name for setting in FinetuneConfig.settings()} | {"level"}
    words = _arguments(checkpoint, write_pairs(tmp_path / "a.jsonl"), tmp_path / "run", steps=1)
    assert app(["pregate", *words[1:], "--level", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["final"] == str(tmp_path / "run" / "final")


@pytest.mark.slow
def test_a_run_prints_accuracy_before_and_after(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_labels(tmp_path / "a.tsv")
    assert app(_arguments(checkpoint, data, tmp_path / "run", epochs=2, lr=1e-2)) == 0
    out = capsys.readouterr().out
    assert "data: 57 examples" in out
    assert "step 0/30  eval loss" in out
    assert "→ 100.0%" in out
    assert "best model (step" in out


def test_json_is_all_that_is_printed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_labels(tmp_path / "a.tsv")
    assert app([*_arguments(checkpoint, data, tmp_path / "run", steps=4), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 4
    assert 0 <= summary["accuracy_before"] <= 1
    assert 0 <= summary["accuracy"] <= 1
    assert summary["final"] == str(tmp_path / "run" / "final")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": ["no.jsonl"]}, "DATA no.jsonl does not exist"),
        ({"checkpoint": "./no/such/model"}, "no/such/model"),
        ({"checkpoint": "empty"}, "empty has no config.json"),
        ({"seq_len": 1000}, "--seq-len 1000 exceeds the 256 positions of this model"),
        ({"seq_len": 4}, "pairs.jsonl:1: 10 tokens exceed --seq-len 4"),
        ({"batch": 0}, "--batch 0 must be at least 1"),
        ({"data": ["bad.jsonl"]}, "bad.jsonl:2: expected a JSON object with a string"),
        ({"data": ["bad.tsv"]}, "bad.tsv:3: expected a label 0, 1, 2"),
        ({"tokenizer": "empty"}, "--tokenizer empty has no tokenizer"),
        ({"gpu_memory": "lots"}, "--gpu-memory='lots' is not a size"),
        ({"slots": 1}, "slots"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_jsonl(tmp_path / "bad.jsonl", [{"text": "a"}, {"words": "b"}])
    (tmp_path / "bad.tsv").write_text("sentence\tlabel\na\t0\nb\tgood\n")
    data = write_pairs(tmp_path / "pairs.jsonl")
    assert app(_words({**tiny_settings(checkpoint, data, tmp_path / "run"), **change})) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "CHECKPOINT is missing"),
        (["--resume"], "--resume needs the folder of the run"),
        (["--resume", "--out", "nowhere"], "folder nowhere does not exist"),
        (["--lora", "2", "--freeze-dense"], "--lora already freezes the whole model"),
        (["--device", "tpu"], "--device tpu is unknown"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_wrong_flags_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert app(["finetune", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_has_its_own_settings_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"checkpoint": "m", "data": ["a.jsonl"], "steps": 7, "lora": 4})
    )
    # --lora-alpha needs --lora, which the run has
    config = resolve({"resume": True, "out": str(tmp_path), "steps": 9, "lora_alpha": 6})
    assert (config.model.checkpoint, config.data.data) == ("m", ("a.jsonl",))
    assert (config.run.steps, config.model.lora, config.model.lora_alpha) == (9, 4, 6)


def _numbers(out: Path) -> list[tuple[object, ...]]:
    names = ("step", "loss", "lr", "grad_norm", "eval_loss")
    lines = read_lines(out / "metrics.jsonl")
    return [tuple(line.get(name) for name in names) for line in lines]


def _models(out: Path) -> dict[str, bytes]:
    files = [*out.glob("best/*.safetensors"), *out.glob("final/*.safetensors")]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def test_a_run_is_resumed_by_the_command_that_began_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(PregateConfig().to_json())
    resumed = {"resume": True, "out": str(tmp_path)}
    assert resolve(resumed, PregateConfig).pregate_level == 1
    with pytest.raises(ConfigError, match=r"by overspill finetune .*; use the command that began"):
        resolve(resumed)


@pytest.mark.slow  # test_kill.py kills a training, and test_finetuner.py resumes a stopped run
def test_a_killed_run_resumes_to_the_same_bits(
    forks: Forks, checkpoint: Path, tmp_path: Path
) -> None:
    data, log = write_pairs(tmp_path / "a.jsonl"), tmp_path / "log.txt"
    changes = {"steps": 8, "eval_every": 3, "save_every": 2, "accumulate": 2, "batch": 2}
    began = time.monotonic()
    whole = _arguments(checkpoint, data, tmp_path / "whole", **changes)
    assert forks.run(whole, log) == 0, log.read_text()
    length = time.monotonic() - began
    moments, out = random.Random(3), tmp_path / "killed"

    def kill(after: float) -> bool:
        resume = ["--resume"] if out.exists() else []
        pid = forks.start([*_arguments(checkpoint, data, out, **changes), *resume], log)
        wait_until((out / "config.json").exists)
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        return forks.wait(pid) == -signal.SIGKILL

    for _ in range(2):
        after = moments.uniform(0, 0.7) * length
        while not kill(after):
            shutil.rmtree(out)  # it was faster than the first
            after /= 2
    # the arguments are in the run's folder
    again = ["finetune", "--resume", "--out", str(out)]
    assert forks.run(again, log) == 0, log.read_text()
    assert _numbers(out) == _numbers(tmp_path / "whole")
    assert len(_numbers(out)) == 8 + 4
    assert _models(out) == _models(tmp_path / "whole") != {}
    left = {path.name for path in out.iterdir() if path.name.startswith(".")}
    assert left == {".lock"}


@pytest.mark.slow  # as in test_kill.py; what is said: train/finetune/test_finetuner.py
def test_ctrl_c_saves_says_how_to_go_on_and_exits_with_130(
    forks: Forks, checkpoint: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "log.txt"
    data = write_pairs(tmp_path / "a.jsonl")
    arguments = _arguments(checkpoint, data, out, steps=100000, save_every=0, eval_every=0)
    pid = forks.start(arguments, log)
    while len(list(read_lines(out / "metrics.jsonl"))) < 3:
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    assert forks.wait(pid) == 130
    step = list(read_lines(out / "metrics.jsonl"))[-1]["step"]
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    assert f"to continue: overspill finetune --resume --out {out}\n" in log.read_text()
    assert not (out / "final").exists()
