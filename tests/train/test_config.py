import json
from pathlib import Path

import pytest

from overspill.core.errors import ConfigError
from overspill.train.config import TrainConfig, make_config, read_config_file, settings
from overspill.train.settings import to_json


def test_every_setting_has_a_help_text_and_its_own_name() -> None:
    names = [setting.name for setting in settings()]
    assert len(names) == len(set(names))
    assert all(len(setting.help) > 10 for setting in settings())


def test_later_layers_win() -> None:
    config = make_config({"steps": 5, "lr": 1e-4}, {"steps": 7})
    assert (config.run.steps, config.optim.lr) == (7, 1e-4)


def test_a_config_comes_back_from_its_file(tmp_path: Path) -> None:
    config = make_config({"preset": "w1", "gpu_memory": "12GiB", "clip": 0, "experts": 4})
    path = tmp_path / "config.json"
    path.write_text(to_json(config))
    assert make_config(read_config_file(path)) == config


def test_toml_may_use_sections_or_not(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('steps = 3\n[data]\ndata = "stdlib"\nseq_len = 64\n[optim]\nlr = 1\n')
    config = make_config(read_config_file(path))
    assert (config.run.steps, config.data.seq_len, config.optim.lr) == (3, 64, 1.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "steps = ", r"a\.toml cannot be parsed"),
        ("a.toml", "[optimizer]\nlr = 1.0", r"there is no section \[optimizer\]"),
        ("a.toml", "[optim]\nsteps = 1", r"steps is in \[optim\]; move it to \[run\]"),
        ("a.json", "[1]", "is a list or a value"),
        ("a.json", '{"stpes": 1}', "there is no setting 'stpes'; did you mean 'steps'"),
        ("a.json", '{"steps": "many"}', "steps = 'many' is not of the right kind; give a int"),
        ("a.json", '{"steps": true}', "steps = True is not of the right kind"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_config(read_config_file(tmp_path / name))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"clip": -1.0}, "--clip -1.0 must be 0 or more"),
        ({"lr": float("nan")}, "--lr nan must be a finite number"),
        ({"pin": 1.5}, "--pin 1.5 must be between 0 and 1"),
        ({"mode": "ssd"}, "--mode ssd is not known; give auto or gpu or host or disk"),
        ({"dtype": "fp16"}, "--dtype fp16 is not known; give bf16 or fp32"),
        ({"gpu_memory": "12 apples"}, "--gpu-memory='12 apples' is not a size"),
    ],
)
def test_a_wrong_value_names_its_flag(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(setting)


def test_the_saved_config_is_plain_json() -> None:
    assert json.loads(to_json(TrainConfig()))["run"]["steps"] == TrainConfig().run.steps
