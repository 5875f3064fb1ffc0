"""docs/server.md: its example runs, and it names all flags and paths of the server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill.serve.llm import LLM
from overspill.server.protocol import ChatRequest, CompletionRequest
from overspill.server.settings import AccessSection, LimitSection, ServerConfig
from tests.server.model import save_model
from tests.server.running import Running, running

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = save_model(tmp_path_factory.mktemp("models") / "tiny")
    with LLM(folder, device="cpu", context=512) as llm, running(llm) as made:
        yield made


def test_its_example_prints_an_answer(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = code.replace("http://127.0.0.1:8000", server.url)
    code = code.replace("max_tokens=32", "max_tokens=32, seed=1")  # else an answer may end early
    exec(compile(code, "docs/server.md", "exec"), {})
    assert 24 <= len(capsys.readouterr().out) <= 32  # a few tokens are not letters


def test_it_names_the_paths_of_the_server(server: Running) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    shown = {path.replace("{model}", "{id}") for path in paths}
    named = set(re.findall(r"`(?:GET |POST )?(/[^`\s]*)`", PAGE))
    assert named == shown | {"/", "/openapi.json"}


def test_it_names_the_flags_and_their_defaults() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    flags = {setting.flag: setting for setting in ServerConfig.settings()}
    assert named <= {*flags, "--json"}
    own = (AccessSection, LimitSection)
    for section in own:
        for name in section.__dataclass_fields__:
            assert "--" + name.replace("_", "-") in named
    for flag, default in re.findall(r"\| `(--[a-z-]+)` \|[^|]*\(([0-9]+)[^|]*\|", PAGE):
        assert str(flags[flag].default).startswith(default)


def test_it_names_the_fields_of_requests() -> None:
    named = set(re.findall(r"`([a-z_]+)[`.=]", PAGE))
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert fields - named <= {"messages", "prompt", "function_call", "modalities"}
