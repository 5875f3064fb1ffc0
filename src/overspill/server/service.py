"""The model that is served, and what is in progress."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from overspill.models.huggingface.lora_config import read_lora_config
from overspill.serve.params import SamplingParams
from overspill.server.answers import Answers
from overspill.server.bridge import Bridge
from overspill.server.errors import ApiError, draining, invalid, too_busy
from overspill.server.metrics import Metrics
from overspill.server.rate import TokenRate
from overspill.server.settings import ServerConfig
from overspill.server.starts import Starts
from overspill.train.trained import model_name

if TYPE_CHECKING:
    from overspill.serve.llm import LLM

log = logging.getLogger("overspill.server")

_THREADS = 4
"""Threads that tokenize: the event loop must not wait for a long prompt."""

T = TypeVar("T")


class Service:
    """What all requests share. Only the event loop uses it, but for `rate`."""

    def __init__(
        self, llm: "LLM", model: str, config: ServerConfig, keys: Sequence[str] | None = None
    ) -> None:
        """`model` is the folder or the repository as it was given, of the model or of an adapter.
        `keys` are those of `config`, if they were read already: a pipe can be read only once."""
        self.llm = llm
        self.config = config
        if config.decoder.given:
            llm.check_params(SamplingParams(**config.decoder.given))
        self.keys = config.read_keys() if keys is None else keys
        given = str(config.model.adapter or model)
        own = default_name(given)
        self.adapter = None if llm.adapter is None else own
        """The name of the LoRA adapter in the weights."""
        self.base = None
        """The name of the model that the adapter was added to."""
        if llm.adapter is not None:
            named = read_lora_config(llm.adapter).base
            self.base = default_name(model if config.model.adapter or named is None else named)
        self.name = config.address.served_name or own
        self._names = frozenset({self.name, given})
        self.max_batch = config.model.max_batch
        self.draining = False
        """New requests are refused; those in progress are finished."""
        self.failed = False
        """The engine takes no more requests; only a new process helps."""
        self.in_flight = 0
        """Answers that are computed or wait."""
        self._posts = 0  # requests that are read or answered
        self.began, self.created = time.monotonic(), int(time.time())
        self.rate = TokenRate()
        self.metrics = Metrics(self)
        self.answers: set[Answers] = set()
        """Those that are computed or wait."""
        self._compiling: set[asyncio.Event] = set()  # of requests that wait for their schema
        self._bridge: Bridge | None = None
        self._threads = ThreadPoolExecutor(_THREADS, "overspill-tokenize")
        self.starts = Starts(self._threads)

    @property
    def bridge(self) -> Bridge:
        """From the thread that computes to the event loop that asks."""
        if self._bridge is None:
            self._bridge = Bridge(asyncio.get_running_loop())
        return self._bridge

    async def in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    @property
    def _room(self) -> int:
        """Answers that may be in progress."""
        return self.max_batch + self.config.limits.max_queue

    @contextmanager
    def post(self) -> Iterator[None]:
        """While a request with a body is read and answered: so many bodies are in memory at most.
        Raises an error if no more are taken."""
        if self.draining:
            raise draining()
        if max(self._posts, self.in_flight) >= self._room:
            raise self._full()
        self._posts += 1
        try:
            yield
        finally:
            self._posts -= 1

    def admit(self, samples: int) -> None:
        """Takes so many answers; they are given back with `release`."""
        if self.draining:
            raise draining()
        if samples > self._room:
            raise invalid(
                f"{samples} answers are asked for, this server takes {self._room} at once; ask for "
                "fewer samples or prompts",
                "n",
            )
        if self.in_flight + samples > self._room:
            raise self._full()
        self.in_flight += samples

    def release(self, samples: int) -> None:
        self.in_flight -= samples

    def _full(self) -> ApiError:
        return too_busy(
            f"{self.in_flight} answers are in progress, and the queue is full "
            f"(--max-queue {self.config.limits.max_queue}); try again later"
        )

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    @property
    def busy(self) -> bool:
        return self.in_flight > 0 or self._posts > 0

    @contextmanager
    def compiling(self, wake: asyncio.Event) -> Iterator[None]:
        """While a request waits for its schema. `wake` is set when no more answers begin."""
        self._compiling.add(wake)
        try:
            yield
        finally:
            self._compiling.discard(wake)

    def stop_compiling(self) -> None:
        """Wakes the requests that wait for their schema, so that they are refused."""
        for wake in self._compiling:
            wake.set()

    def cancel_all(self) -> None:
        """Ends what is in progress at once."""
        self.draining = True
        for answers in list(self.answers):
            answers.cancel()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def default_name(model: str) -> str:
    """The name of a folder, without the folders it is in; that of a repository of the hub. The
    models of a run have the name of the run."""
    path = Path(model).expanduser()
    return model_name(path) if path.exists() else model
