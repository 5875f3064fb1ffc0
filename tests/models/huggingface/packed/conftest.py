"""The checkpoints that tests of packed weights share."""

import pytest

from tests.models.huggingface.packed.cases import Pairs


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("packed"))
