"""Who may use the server."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from overspill.core.errors import ConfigError
from overspill.serve.llm import LLM
from overspill.server.settings import ServerConfig
from tests.server.running import Running, running

PATHS = (
    "/",
    "/page/main.js",
    "/v1/models",
    "/v1/models/tiny",
    "/metrics",
    "/stats",
    "/openapi.json",
    "/nowhere",
)


@pytest.fixture(scope="module")
def locked(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("first-key\n\nsecond-key\n", encoding="utf-8-sig")
    with running(llm, api_key="third-key", api_key_file=str(file)) as server:
        yield server


def test_without_the_key_only_health_answers(locked: Running) -> None:
    assert locked.http.get("/health").status_code == 200
    wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic !"},
             {"Authorization": "first-key"}, {"Authorization": b"Bearer \xff"})  # fmt: skip
    for path in PATHS:
        for headers in wrong:
            answer = locked.http.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert locked.http.post(path, json={"prompt": "a"}).status_code == 401
    with locked.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_each_key_opens_everything(locked: Running) -> None:
    for key in ("first-key", "second-key", "third-key"):
        with locked.client(key) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
    # a browser sends the key as a password after this challenge
    for path in ("/", "/page/main.js"):
        assert locked.http.get(path).headers["www-authenticate"].startswith("Basic")
    assert locked.http.get("/stats").headers["www-authenticate"] == "Bearer"
    assert locked.http.get("/page/main.js", auth=("", "first-key")).status_code == 200
    assert locked.http.get("/stats", auth=("", "first-key")).status_code == 200


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_API_KEY", "from-there")
    assert ServerConfig.make({"api_key": "flag"}).read_keys() == ("flag", "from-there")


@pytest.mark.parametrize("content", [None, "", " \n", "two words", "ключ"])
def test_a_key_that_cannot_be_sent_is_refused(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OVERSPILL_API_KEY", raising=False)
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        ServerConfig.make({"api_key_file": str(file)}).read_keys()
    with pytest.raises(ConfigError, match="--api-key"):
        ServerConfig.make({"api_key": content or ""}).read_keys()


def test_a_name_that_points_here_is_refused_without_a_key(server: Running, locked: Running) -> None:
    host = {"Host": "evil.example:80"}
    assert server.http.get("/stats", headers=host).status_code == 403
    for name in ("localhost", "127.0.0.1:1", "[::1]:8000", "10.0.0.7"):
        assert server.http.get("/stats", headers={"Host": name}).status_code == 200
    key = {"Authorization": "Bearer first-key"}
    assert locked.http.get("/stats", headers={**host, **key}).status_code == 200


def test_a_page_of_another_origin_is_refused(server: Running, llm: LLM) -> None:
    body = {"prompt": "a", "max_tokens": 1}

    def post(to: Running, origin: str) -> httpx.Response:
        return to.http.post("/v1/completions", json=body, headers={"Origin": origin})

    assert post(server, "https://evil.example").status_code == 403
    for origin in ("null", "", "http://[", "http://a]b"):
        assert post(server, origin).status_code == 403
    assert post(server, server.url).status_code == 200
    assert "access-control-allow-origin" not in post(server, server.url).headers
    with running(llm, allow_origin="https://good.example, http://b.example", api_key="k") as open_:
        assert post(open_, "https://evil.example").status_code == 403
        ask = {
            "Origin": "https://good.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
            "Access-Control-Request-Private-Network": "true",
        }
        answer = open_.http.options("/v1/completions", headers=ask)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert answer.headers["access-control-allow-private-network"] == "true"
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        assert post(open_, "https://good.example").status_code == 401


@pytest.mark.parametrize("origin", ["example", "http://", "http://["])
def test_an_origin_is_checked_when_the_server_starts(origin: str) -> None:
    with pytest.raises(ConfigError, match=f"--allow-origin {re.escape(origin[:5])}"):
        _ = ServerConfig.make({"allow_origin": origin}).allowed_origins


def test_the_page_answers_head_as_monitors_ask(server: Running) -> None:
    answer = server.http.head("/")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) == len(server.http.get("/").content)
