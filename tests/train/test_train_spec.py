from pathlib import Path
from typing import Any

import pytest

from overspill.train.config import TrainConfig
from overspill.train.train_spec import TrainSpec, plan_training, shape_of
from tests.train.fakes import tiny_settings


def _plan(settings: dict[str, Any]) -> TrainSpec:
    return plan_training(TrainConfig.make(settings), lambda line: None)


@pytest.mark.parametrize("preset", ["nano", "moe-s", "w1"])
def test_the_facts_of_a_checkpoint_are_the_whole_shape(tmp_path: Path, preset: str) -> None:
    spec = _plan(tiny_settings(tmp_path, preset=preset))
    assert shape_of(spec.facts, spec.shape.max_seq) == spec.shape


def test_nano_gets_a_budget_of_an_eighth_unless_the_user_gives_one(tmp_path: Path) -> None:
    data = {name: tiny_settings(tmp_path)[name] for name in ("data", "cache", "seq_len")}

    def slots(**settings: Any) -> int | None:
        return _plan({**data, **settings}).slots

    assert slots() == 8
    assert slots(slots=20) == 20
    assert slots(gpu_memory="1GiB") is None
    assert slots(mode="gpu") is None
    assert slots(preset="moe-s") is None
