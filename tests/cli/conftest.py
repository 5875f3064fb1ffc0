import pytest

from tests.cli.forks import Forks
from tests.train.pictures import no_pictures, pictures

__all__ = ["no_pictures", "pictures"]


@pytest.fixture(scope="session")
def forks() -> Forks:
    return Forks()
