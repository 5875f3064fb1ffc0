"""Checkpoints are written once for all tests; each test trains its own copy of the weights."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.train.finetune.tiny import save_mixtral

    return save_mixtral(tmp_path_factory.mktemp("checkpoints") / "mixtral")


@pytest.fixture(scope="session")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.train.finetune.tiny import save_switch

    return save_switch(tmp_path_factory.mktemp("checkpoints") / "switch")
