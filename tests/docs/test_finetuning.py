"""docs/finetuning.md: its commands run, and it names all flags."""

import re
import shlex
from pathlib import Path

import pytest

from overspill.cli.main import app
from overspill.train.finetune.config import FinetuneConfig
from overspill.train.metrics import read_lines
from tests.train.finetune.tiny import save_mixtral

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "finetuning.md").read_text()
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_it_names_every_flag_and_no_other() -> None:
    flags = {
        setting.flag
        for setting in FinetuneConfig.settings()
        if setting.name not in ("checkpoint", "data")
    }
    named = set(re.findall(r"--[a-z][a-z0-9-]*", PAGE))
    off = {
        setting.flag.replace("--", "--no-", 1)
        for setting in FinetuneConfig.settings()
        if setting.kind is bool
    }
    of_other_commands = {"--adapter", "--base"}
    assert flags <= named
    assert named <= flags | off | {"--json"} | of_other_commands


def _commands() -> list[list[str]]:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    return [shlex.split(line) for line in block.splitlines() if line.startswith("overspill")]


@pytest.mark.parametrize("command", _commands(), ids=lambda command: command[3])
def test_its_commands_run_on_its_data(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_mixtral(tmp_path / "tiny", TEMPLATE)
    files = re.findall(r"`([a-z]+\.(?:jsonl|tsv))`:\n```[a-z]+\n(.*?)```", PAGE, re.DOTALL)
    assert len(files) == 4
    for name, content in files:
        (tmp_path / name).write_text(content)
    assert command[0] == "overspill"
    assert app(command[1:]) == 0
    assert (Path(command[-1]) / "final").is_dir()
    lines = read_lines(Path(command[-1]) / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) >= 20
    assert losses[-1] < losses[0]
