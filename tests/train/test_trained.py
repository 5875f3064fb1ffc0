from pathlib import Path

import pytest

from overspill.core.errors import ConfigError
from overspill.train.trained import find_model, model_name


def test_a_run_of_finetune_stands_for_its_last_model(tmp_path: Path) -> None:
    run = tmp_path / "tuned"
    run.mkdir()
    assert find_model(run) == run  # not a run yet
    (run / "config.json").write_text('{"model": {"checkpoint": "base", "lora": 4}}')
    with pytest.raises(
        ConfigError, match=r"has no model yet; finish it with --resume --out .*tuned"
    ):
        find_model(run)
    (run / "best").mkdir()
    assert find_model(run) == run / "best"
    (run / "final").mkdir()
    assert find_model(run) == run / "final"
    assert [model_name(run / name) for name in ("final", "best", ".")] == ["tuned"] * 3


def test_other_folders_stand_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    for config in ('{"model": {"preset": "nano"}}', '{"model_type": "mixtral"}', "{", "[]"):
        (tmp_path / "config.json").write_text(config)
        assert find_model(tmp_path) == tmp_path
        assert model_name(tmp_path / "final") == "final"
