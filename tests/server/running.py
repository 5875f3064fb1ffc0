"""Servers in a thread of the tests."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from overspill.serve.params import Piece, Result, SamplingParams
from overspill.server.run import address_of, bind, serve
from overspill.server.service import Service
from overspill.server.settings import ServerConfig


@dataclass
class Running:
    """A server that can be reached."""

    url: str
    service: Service
    http: httpx.Client

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def wait_until(self, holds: Callable[[], bool], seconds: float = 60) -> bool:
        end = time.monotonic() + seconds
        while not holds() and time.monotonic() < end:
            time.sleep(0.005)
        return holds()

    @property
    def idle(self) -> bool:
        """Whether nothing of any request is left."""
        stats = self.service.llm.stats()
        free = stats["kv_blocks"] == stats["kv_blocks_free"]
        return not self.service.busy and not stats["running"] + stats["waiting"] and free


@contextmanager
def running(llm: Any, **flags: Any) -> Iterator[Running]:
    """A server with these settings; several may use one LLM."""
    config = ServerConfig.make({"port": 0, "served_name": "tiny", **flags})
    bound, started = bind(config), threading.Event()
    service = Service(llm, "models/tiny", config)
    thread = threading.Thread(target=serve, args=(service, bound, started.set))
    thread.start()
    assert started.wait(60)
    url = address_of(bound)
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Running(url, service, http)
    finally:
        service.cancel_all()
        thread.join(60)
        assert not thread.is_alive()


class HeldLLM:
    """Starts to answer when `go` is set."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def submit(self, *args: Any, **options: Any) -> Any:
        assert self.go.wait(60)
        return self._llm.submit(*args, **options)


class ScriptedLLM:
    """Answers with texts that it is given, or fails."""

    def __init__(self, llm: Any, texts: list[str], error: Exception | None = None) -> None:
        self._llm = llm
        self._texts = texts
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def submit(
        self, prompt: list[int], params: SamplingParams, on_piece: Callable[[Piece], None]
    ) -> "Script":
        for text in self._texts:
            on_piece(Piece(text, [1]))
        on_piece(Piece("", [2], "stop" if self._error is None else "error"))
        return Script("".join(self._texts), len(self._texts) + 1, len(prompt), self._error)


class WaitingLLM(ScriptedLLM):
    """Gives an answer when the test says so."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm, [])
        self._asked: queue.SimpleQueue[Callable[[Piece], None]] = queue.SimpleQueue()

    def submit(
        self, prompt: list[int], params: SamplingParams, on_piece: Callable[[Piece], None]
    ) -> "Script":
        self._asked.put(on_piece)
        return Script("", 1, len(prompt), None)

    def finish(self, text: str) -> None:
        self._asked.get(timeout=60)(Piece(text, [1], "stop"))


@dataclass
class Script:
    """A submission of a `ScriptedLLM`."""

    text: str
    tokens: int
    prompt_tokens: int
    error: Exception | None
    finished: bool = True

    def cancel(self) -> None:
        """It is complete already."""

    def result(self) -> Result:
        return Result(self.text, [1] * self.tokens, "stop", self.prompt_tokens)
