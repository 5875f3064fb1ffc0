import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overspill.cli.main import app
from overspill.cli.train import resolve
from overspill.core.errors import ConfigError
from overspill.serve.config import ServeConfig
from overspill.train.config import TrainConfig
from tests.train.fakes import tiny_settings


def _flags(chosen: dict[str, Any]) -> list[str]:
    return [
        w for name, value in chosen.items() for w in (f"--{name.replace('_', '-')}", str(value))
    ]


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from overspill.cli.main import app; "
        "commands = [[], ['train'], ['finetune'], ['export'], ['probe']]; "
        "assert all(app([*command, '--help']) == 0 for command in commands); "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(root / "src")}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"train" in done.stdout


def test_a_model_that_cannot_be_loaded_is_refused_before_torch_is_imported(
    tmp_path: Path,
) -> None:
    quantized = {"model_type": "qwen3_moe", "num_experts": 4, "quantization_config": {"bits": 4}}
    for name, config in (
        ("dense", {"model_type": "llama"}),
        ("quantized", quantized),
        ("mute", {"model_type": "mixtral", "num_local_experts": 8}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "mute" / "model.safetensors").touch()
    (tmp_path / "a.gguf").touch()
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    wrong = [
        (command, model, reason)
        for command in (["finetune", "", "a.jsonl"], ["pregate", "", "a.jsonl"],
                        ["generate", "", "a"], ["chat", ""], ["serve", ""])
        for model, reason in (("dense", "is a dense model"), ("quantized", "is quantized"),
                              ("a.gguf", "is corrupt or truncated"), ("mute", "has no tokenizer"))
        if (command[0], model) != ("serve", "mute")  # it answers prompts of token ids
    ]  # fmt: skip
    code = (
        "import sys; from overspill.cli.main import app; "
        f"codes = [app([command[0], model, *command[2:]]) for command, model, _ in {wrong}]; "
        f"assert codes == {[2] * len(wrong)}, codes; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(root / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(wrong)
    for line, (_, _, reason) in zip(lines, wrong, strict=True):
        assert reason in line


def test_help_shows_every_setting_and_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert app(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for setting in TrainConfig.settings():
        if setting.name != "preset":
            assert setting.flag in text, setting.flag
    assert "overspill train moe-m --experts 16 --gpu-memory 12GiB" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["--version"]) == 0
    assert capsys.readouterr().out.startswith("overspill")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nanoo"], "preset 'nanoo' is not one of"),
        (["train", "--gpu-memory", "12 apples"], "--gpu-memory='12 apples' is not a size"),
        (["train", "--data", "/no/such"], "--data /no/such does not exist"),
        (["train", "--tokenizer", "/no/such"], "--tokenizer /no/such cannot be read"),
        (["train", "no-such.toml"], "config file no-such.toml cannot be read"),
        (["train", "--steps", "0"], "--steps 0 must be at least 1"),
        (["train", "--steps", "many"], "Invalid value for '--steps'"),
        (["train", "--no-such-flag"], "--no-such-flag"),
        (["train", "--device", "tpu"], "--device tpu is unknown"),
        (["train", "--resume", "--out", "nowhere"], "folder nowhere does not exist"),
        (["train", "--slots", "1"], "slots"),
        (["train", "--gpu-memory", "64KiB"], "--gpu-memory 64KiB is too small"),
        (["train", "--mode", "host", "--host-memory", "1000TiB"], "--host-memory"),
        (["train", "--top-k", "99"], "top_k=99 is more than n_experts=16"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--tokenizer" not in arguments and "--data" not in arguments and "train" in arguments:
        arguments = [*arguments, "--cache", str(tmp_path / "cache"), "--data", __file__]
    assert app(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_json_is_all_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["train", *_flags(tiny_settings(tmp_path, steps=3)), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 3
    assert summary["out"] == str(tmp_path / "run")
    assert summary["loss"] > 0


def test_a_config_file_runs_and_flags_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(tiny_settings(tmp_path, steps=99)))
    assert app(["train", str(path), "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "step 2/2" in out
    assert f"run folder: {tmp_path / 'run'}" in out
    assert app(["train", "--resume", "--out", str(tmp_path / "run"), "--steps", "3"]) == 0
    assert "step 3/3" in capsys.readouterr().out


def test_a_corrupt_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app(["train", *_flags(tiny_settings(tmp_path, steps=2))]) == 0
    model = next((tmp_path / "run" / "checkpoints").glob("*/model.safetensors"))
    content = model.read_bytes()
    model.write_bytes(b"\xff" * 16 + content[16:])  # the size is right, the header is not
    capsys.readouterr()
    assert app(["train", "--resume", "--out", str(tmp_path / "run"), "--steps", "3"]) == 2
    error = capsys.readouterr().err
    assert "model.safetensors is corrupt" in error
    assert error.count("\n") == 1


def test_a_resumed_run_has_its_own_settings_and_flags_win(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"steps": 7, "experts": 4, "preset": "moe-s"}')
    config = resolve(None, {"resume": True, "out": str(run), "steps": 9})
    assert (config.run.steps, config.model.experts, config.model.preset) == (9, 4, "moe-s")
    assert resolve("w1", {"resume": True, "out": str(run)}).model.preset == "w1"


def test_a_run_that_was_killed_before_its_config_needs_its_settings_again(tmp_path: Path) -> None:
    resumed = {"resume": True, "out": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"has no config.*repeat the command that began it"):
        resolve(None, resumed)
    assert resolve("w1", resumed).model.preset == "w1"
    assert resolve(None, {**resumed, "experts": 4}).model.experts == 4


def test_an_unknown_word_is_taken_for_a_preset_and_a_missing_file_is_not(tmp_path: Path) -> None:
    assert resolve("anything", {}).model.preset == "anything"
    with pytest.raises(ConfigError, match=r"config file a\.toml cannot be read"):
        resolve("a.toml", {})


def test_ctrl_c_while_a_model_is_loaded_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: ServeConfig, model: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ServeConfig, "open", interrupt)
    for words in (["generate", "model", "a"], ["chat", "model"]):
        assert app(words) == 130
    assert capsys.readouterr().err == ""
