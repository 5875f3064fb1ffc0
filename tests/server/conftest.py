from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.cli.conftest import forks

if TYPE_CHECKING:
    from openai import OpenAI

    from overspill.serve.llm import LLM
    from tests.server.running import Running

__all__ = ["forks"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.server.model import save_model

    return str(save_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")  # tests of engines want no threads of others
def llm(model_folder: str) -> "Iterator[LLM]":
    from overspill.serve.llm import LLM

    with LLM(model_folder, device="cpu", context=512, max_batch=4) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(llm: "LLM") -> "Iterator[Running]":
    """For all tests that need no settings of their own."""
    from tests.server.running import running

    with running(llm) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: "Running") -> "Iterator[OpenAI]":
    with server.client() as made:
        yield made
