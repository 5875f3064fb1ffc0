"""Ranks are forked from one server."""

import pytest

from tests.parallel.processes import start_server


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    start_server()
