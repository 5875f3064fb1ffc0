"""Checkpoints are written once for all tests; each test trains its own copy of the weights."""

from pathlib import Path

import pytest

# Imported when needed: pytest reads this file before it configures itself if the command names this
# folder, and Triton, once imported, would not use its interpreter.


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.train.finetune.tiny import save_mixtral

    return save_mixtral(tmp_path_factory.mktemp("checkpoints") / "mixtral")


@pytest.fixture(scope="session")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.train.finetune.tiny import save_switch

    return save_switch(tmp_path_factory.mktemp("checkpoints") / "switch")
