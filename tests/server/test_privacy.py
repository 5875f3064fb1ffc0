"""No request reads a file, and none starts a process or a connection."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.running import Running

_WATCHED = ("open", "os.listdir", "os.scandir", "subprocess.Popen", "os.system", "socket.connect")


class Watch:
    """Events of Python's audit hooks, in all threads but that of the test."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        self._own = threading.get_ident()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in _WATCHED and threading.get_ident() != self._own:
            self.seen.append(f"{event} {arguments[0]}")

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        self.seen, self.on = [], True
        try:
            yield self.seen
        finally:
            self.on = False


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()  # a hook stays until the process ends


def ask(server: Running, target: str) -> set[int]:
    """Asks for a file in every way that a request has."""
    http, file = server.http, f"file://{target}"
    parts = [{"type": "image_url", "image_url": {"url": file}}]
    schema = {"type": "json_schema", "json_schema": {"schema": {"$ref": file}}}
    bodies: list[dict[str, Any]] = [
        {"model": target},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": file}]},
        {"response_format": schema},
        {"chat_template_kwargs": {"chat_template": target}},
        {"chat_template_kwargs": {"shout": f"{{% include '{target}' %}}"}},
    ]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answers = [http.post("/v1/chat/completions", json={**chat, **body}) for body in bodies]
    up = "/.." * 12 + target
    paths = (up, f"/%2e%2e{up}", f"/v1/models{up}", f"/v1/models/{target}", f"/?file={target}")
    return {answer.status_code for answer in answers + [http.get(path) for path in paths]}


def test_no_request_reads_a_file_or_connects_elsewhere(
    server: Running, watch: Watch, tmp_path: Any
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    ask(server, str(secret))  # modules are imported with the first requests
    with watch.watching() as seen:
        with open(secret):
            pass
        statuses = ask(server, str(secret))
    assert statuses <= {200, 400, 404}
    assert [event for event in seen if "/overspill/server/page/" not in event] == []


def test_the_watch_sees_other_threads(watch: Watch, tmp_path: Any) -> None:
    file = tmp_path / "file"
    with watch.watching() as seen:
        thread = threading.Thread(target=file.write_text, args=("x",))
        thread.start()
        thread.join()
    assert seen == [f"open {file}"]
