"""One server for all tests that need processes: starting one costs seconds of imports."""

from collections.abc import Iterator

import pytest

from tests.cli.forks import Forks
from tests.train.pictures import no_pictures, pictures

__all__ = ["no_pictures", "pictures"]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()
