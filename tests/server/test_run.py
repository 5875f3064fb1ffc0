"""`overspill serve` as a process: signals, ports, and what it writes."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from overspill.cli import serve as serve_command
from overspill.cli.main import app
from tests.cli.forks import SLOW, Forks

LONG = {"prompt": "A secret prompt", "max_tokens": 200, "ignore_eos": True, "stream": True}


@dataclass
class Process:
    """A server, and what it has written."""

    pid: int
    log: Path
    forks: Forks

    def wait_for(self, text: str) -> str:
        end = time.monotonic() + 60
        while text not in (written := self.log.read_text() if self.log.exists() else ""):
            assert time.monotonic() < end, written
            time.sleep(0.01)
        return written

    @property
    def url(self) -> str:
        found = self.wait_for('"url"')
        (line,) = (line for line in found.splitlines() if '"url"' in line)
        return str(json.loads(line)["url"])

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        return self.forks.wait(self.pid)


@pytest.fixture
def process(forks: Forks, model_folder: str, tmp_path: Path) -> Iterator[Any]:
    """Starts servers; they end with the test."""
    started: list[Process] = []

    def start(*flags: str, **environment: str) -> Process:
        log = tmp_path / f"log{len(started)}"
        words = ["serve", model_folder, "--port", "0", "--device", "cpu", "--json", *flags]
        started.append(Process(forks.start(words, log, environment), log, forks))
        return started[-1]

    yield start
    for each in started:
        try:
            each.kill(signal.SIGKILL)
        except ProcessLookupError:
            continue


def stream(url: str, into: list[str]) -> threading.Thread:
    """Reads an answer in a thread; `into` gets its lines."""

    def read() -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
                into.extend(line for line in answer.iter_lines() if line)
        except httpx.TransportError:
            into.append("disconnected")

    thread = threading.Thread(target=read)
    thread.start()
    end = time.monotonic() + 60
    with httpx.Client(timeout=60) as client:
        while client.get(f"{url}/stats").json()["in_flight"] == 0:
            assert time.monotonic() < end
    return thread


def test_sigterm_finishes_answers_and_refuses_new_ones(process: Any, tmp_path: Path) -> None:
    server = process(**{SLOW: str(tmp_path / "go")})
    url, lines = server.url, []
    thread = stream(url, lines)
    server.kill(signal.SIGTERM)
    server.wait_for("finishing answers")
    health = httpx.get(f"{url}/health", timeout=60)
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
    (tmp_path / "go").touch()
    thread.join()
    assert server.end() == 0
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]
    assert "secret" not in server.log.read_text()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT]
)
def test_a_second_signal_ends_at_once(number: int, process: Any, tmp_path: Path) -> None:
    server = process(**{SLOW: str(tmp_path / "never")})
    lines: list[str] = []
    thread = stream(server.url, lines)
    server.kill(number)
    server.wait_for("finishing answers")
    server.kill(number)
    assert server.end() == 0
    thread.join()
    assert "data: [DONE]" not in lines


def test_requests_are_logged_only_if_that_is_asked_for(process: Any) -> None:
    servers = [
        process(OVERSPILL_API_KEY="the-key"),
        process("--log-requests", "--api-key", "the-key"),
    ]
    headers = {"Authorization": "Bearer the-key", "X-Header": "my header"}
    logs = []
    for server in servers:
        body = {"prompt": "A secret prompt", "max_tokens": 1}
        with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
            assert client.post("/v1/completions", json=body).is_success
            body = {"prompt": "A secret prompt", "max_tokens": "one"}
            client.post("/v1/completions", json=body)
            client.get("/A secret path")
        server.kill(signal.SIGTERM)
        assert server.end() == 0
        logs.append(server.log.read_text())
    assert "secret" not in logs[0]
    assert logs[1].count("A secret prompt") == 2
    for log in logs:
        assert "the-key" not in log
        assert "my header" not in log


def test_keys_may_come_from_a_pipe(process: Any, tmp_path: Path) -> None:
    """As with --api-key-file <(command): what was read is gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    server = process("--api-key-file", str(pipe))
    pipe.write_text("the-key\n")
    headers = {"Authorization": "Bearer the-key"}
    assert httpx.get(f"{server.url}/stats", timeout=60).status_code == 401
    assert httpx.get(f"{server.url}/stats", headers=headers, timeout=60).status_code == 200


def test_a_port_in_use_is_one_line(model_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        capsys.readouterr()
        assert app(["serve", model_folder, "--port", port]) == 2
    error = capsys.readouterr().err
    assert f"port {port}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port 70000 must be a port"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--host", "a..b"], "cannot listen on a..b"),
        (["--max-body", "many"], "--max-body"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere cannot be read"),
        (["--allow-origin", "a"], "--allow-origin a is not an origin"),
    ],
)
def test_a_wrong_flag_is_one_line(
    flags: list[str], message: str, model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert app(["serve", model_folder, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_command, "PACKAGES", ("fastapi", "no_such_package"))
    capsys.readouterr()
    assert app(["serve", "/nowhere", "--host", "0.0.0.0"]) == 2
    error = capsys.readouterr().err
    assert "no_such_package" in error
    assert "pip install '.[serve]' in the checkout" in error


def test_an_open_server_without_a_key_is_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OVERSPILL_API_KEY", raising=False)
    (tmp_path / "config.json").write_text('{"model_type": "unknown_moe"}')
    (tmp_path / "model.safetensors").touch()
    for flags, warned in (([], True), (["--api-key", "k"], False)):
        capsys.readouterr()
        assert app(["serve", str(tmp_path), "--host", "0.0.0.0", "--port", "0", *flags]) == 2
        assert ("--api-key-file" in capsys.readouterr().err) == warned
