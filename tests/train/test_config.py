import json
from pathlib import Path

import pytest

from overspill.core.errors import ConfigError
from overspill.train.config import TrainConfig


def test_every_setting_has_a_help_text_and_its_own_name() -> None:
    names = [setting.name for setting in TrainConfig.settings()]
    assert len(names) == len(set(names))
    assert all(len(setting.help) > 10 for setting in TrainConfig.settings())


def test_later_layers_win() -> None:
    config = TrainConfig.make({"steps": 5, "lr": 1e-4}, {"steps": 7})
    assert (config.run.steps, config.optim.lr) == (7, 1e-4)


def test_a_config_comes_back_from_its_file(tmp_path: Path) -> None:
    config = TrainConfig.make({"preset": "w1", "gpu_memory": "12GiB", "clip": 0, "experts": 4})
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    assert TrainConfig.make(TrainConfig.read_file(path)) == config


@pytest.mark.parametrize("removed", ["lookahead", "pin", "resident_share"])
def test_a_config_of_an_earlier_version_may_have_settings_that_were_removed(
    removed: str, tmp_path: Path
) -> None:
    config = TrainConfig.make({"steps": 3, "slots": 5})
    tree = json.loads(config.to_json())
    tree["memory"][removed] = 0.25
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tree))
    assert TrainConfig.make(TrainConfig.read_file(path)) == config


def test_toml_may_use_sections_or_not(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('steps = 3\n[data]\ndata = "stdlib"\nseq_len = 64\n[optim]\nlr = 1\n')
    config = TrainConfig.make(TrainConfig.read_file(path))
    assert (config.run.steps, config.data.seq_len, config.optim.lr) == (3, 64, 1.0)


@pytest.mark.parametrize(("name", "text"), [("a.toml", "steps = 3"), ("a.json", '{"steps": 3}')])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert TrainConfig.read_file(tmp_path / name) == {"steps": 3}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "steps = ", r"a\.toml cannot be parsed"),
        ("a.toml", "[optimizer]\nlr = 1.0", r"unknown section \[optimizer\]"),
        ("a.toml", "[optim]\nsteps = 1", r"steps is in \[optim\]; move it to \[run\]"),
        ("a.json", "[1]", "is not a table"),
        ("a.json", "[" * 100_000, r"a\.json cannot be parsed: it is nested too deeply"),
        ("a.toml", "x = " + "[" * 100_000, r"a\.toml cannot be parsed"),
        ("a.toml", "steps = " + "9" * 5000, r"a\.toml cannot be parsed"),
        ("a.json", '{"stpes": 1}', "unknown setting 'stpes'; did you mean 'steps'"),
        ("a.json", '{"steps": "many"}', "steps = 'many' has the wrong type; give int"),
        ("a.json", '{"steps": true}', "steps = True has the wrong type"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        TrainConfig.make(TrainConfig.read_file(tmp_path / name))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"clip": -1.0}, "--clip -1.0 must be 0 or more"),
        ({"lr": float("nan")}, "--lr nan must be a finite number"),
        ({"min_lr": 1.5}, "--min-lr 1.5 must be between 0 and 1"),
        ({"mode": "ssd"}, "--mode ssd is unknown; give auto or gpu or host or disk"),
        ({"dtype": "fp16"}, "--dtype fp16 is unknown; give bf16 or fp32"),
        ({"gpu_memory": "12 apples"}, "--gpu-memory='12 apples' is not a size"),
    ],
)
def test_a_wrong_value_names_its_flag(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.make(setting)


def test_the_saved_config_is_plain_json() -> None:
    assert json.loads(TrainConfig().to_json())["run"]["steps"] == TrainConfig().run.steps
