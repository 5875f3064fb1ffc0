"""A run of `overspill train` with random weights, of one step."""

from pathlib import Path

import pytest

from overspill.cli.main import app
from tests.train.fakes import tiny_settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    flags = [
        word
        for name, value in tiny_settings(folder, steps=1).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert app(["train", *flags]) == 0
    return folder / "run"
