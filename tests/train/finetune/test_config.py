from pathlib import Path
from typing import Any

import pytest

from overspill.core.errors import ConfigError
from overspill.train.finetune.config import FinetuneConfig


def test_every_setting_has_a_help_text_and_its_own_name() -> None:
    names = [setting.name for setting in FinetuneConfig.settings()]
    assert len(names) == len(set(names))
    assert all(len(setting.help) > 10 for setting in FinetuneConfig.settings())


def test_a_config_comes_back_from_its_file(tmp_path: Path) -> None:
    config = FinetuneConfig.make(
        {"checkpoint": "m", "data": ["a.jsonl", "b.jsonl"], "lora": 4, "clip": 0}
    )
    (tmp_path / "config.json").write_text(config.to_json())
    assert FinetuneConfig.make(FinetuneConfig.read_file(tmp_path / "config.json")) == config
    assert config.data.data == ("a.jsonl", "b.jsonl")


def test_the_run_is_called_after_the_checkpoint() -> None:
    assert FinetuneConfig.make({"checkpoint": "models/mixtral/"}).name == "finetune-mixtral"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch": 0}, "--batch 0 must be at least 1"),
        ({"lora": 0}, "--lora 0 must be at least 1"),
        ({"epochs": 0.0}, "--epochs 0 must be more than 0"),
        ({"eval_split": 1.5}, "--eval-split 1.5 must be between 0 and 1"),
        ({"eval_split": 1.0}, "--eval-split 1 leaves nothing to train on"),
        ({"dtype": "fp16"}, "--dtype fp16 is unknown; give bf16 or fp32"),
        ({"freeze_experts": True, "freeze_dense": True}, "leaves nothing to train"),
        ({"lora": 4, "freeze_dense": True}, "--lora already freezes the whole model"),
        ({"lora_alpha": 4}, "need --lora RANK"),
        ({"lora_targets": "q_proj"}, "need --lora RANK"),
        ({"lora_experts": True}, "--lora-experts needs --lora RANK"),
        ({"lora": 4, "lora_experts_rank": 2}, "--lora-experts-rank needs --lora-experts"),
        ({"label_prompt": "Is it good?"}, "--label-prompt 'Is it good\\?' lacks {sentence}"),
        ({"label_text": "yes"}, "--label-text 'yes' lacks {label}"),
        ({"data": "a.jsonl"}, "data = 'a.jsonl' has the wrong type; give a list"),
        ({"epoch": 2}, "unknown setting 'epoch'; did you mean 'epochs'"),
        ({"xyzzy": 2}, "see overspill finetune --help"),
    ],
)
def test_a_wrong_setting_is_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FinetuneConfig.make(setting)
