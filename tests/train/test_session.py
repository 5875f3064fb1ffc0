from pathlib import Path

import pytest

from overspill.train.config import make_config
from overspill.train.session import draw_up, shape_of
from overspill.train.tokenizer import ByteTokenizer
from tests.train.fakes import tiny_settings


@pytest.mark.parametrize("preset", ["nano", "moe-s", "w1"])
def test_the_facts_of_a_checkpoint_are_the_whole_shape(tmp_path: Path, preset: str) -> None:
    blueprint = draw_up(make_config(tiny_settings(tmp_path, preset=preset)), ByteTokenizer())
    assert shape_of(blueprint.facts, blueprint.shape.max_seq) == blueprint.shape
