"""The model that is served, and the answers that are in progress."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from overspill.models.huggingface.lora_config import read_lora_config
from overspill.serve.params import SamplingParams
from overspill.server.answers import Answers
from overspill.server.errors import ApiError, draining, invalid, too_busy
from overspill.server.loop_queue import LoopQueue
from overspill.server.metrics import Metrics
from overspill.server.rate import TokenRate
from overspill.server.settings import ServerConfig
from overspill.server.start_batcher import StartBatcher
from overspill.train.trained import model_name

if TYPE_CHECKING:
    from overspill.serve.llm import LLM

log = logging.getLogger("overspill.server")

_THREADS = 4
"""Threads that tokenize: the event loop must not wait for a long prompt."""

T = TypeVar("T")


class Service:
    """State that all requests of a server share: the model, the limits, the answers in progress.
    Only the event loop uses it, except for `rate`."""

    def __init__(
        self, llm: "LLM", model: str, config: ServerConfig, keys: Sequence[str] | None = None
    ) -> None:
        """`model` is the folder or the repository as it was given, of the model or of an adapter.
        `keys` are the keys of `config`, if they were read already: a pipe can be read only once."""
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
        """Number of answers that are computed or wait."""
        self._posts = 0  # requests that are read or answered
        self.began, self.created = time.monotonic(), int(time.time())
        self.rate = TokenRate()
        self.metrics = Metrics(self.stats)
        self.answers: set[Answers] = set()
        """Answers that are computed or wait."""
        self._compiling: set[asyncio.Event] = set()  # of requests that wait for their schema
        self._threads = ThreadPoolExecutor(_THREADS, "overspill-tokenize")
        self.start_batcher = StartBatcher(self._threads)

    @cached_property
    def loop_queue(self) -> LoopQueue:
        """Function calls from the thread that computes to the event loop."""
        return LoopQueue(asyncio.get_running_loop())

    async def in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    @property
    def _room(self) -> int:
        """Number of answers that may be in progress."""
        return self.max_batch + self.config.limits.max_queue

    @contextmanager
    def post(self) -> Iterator[None]:
        """Context in which a request with a body is read and answered. Raises an error if the
        server is full: this limits the memory of bodies."""
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
        """Count `samples` more answers as in progress, until `release`. Raises an error if the
        server is full."""
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
        """Context in which a request waits for its schema. `wake` is set when no more answers
        begin."""
        self._compiling.add(wake)
        try:
            yield
        finally:
            self._compiling.discard(wake)

    def stop_compiling(self) -> None:
        """Wake the requests that wait for their schema, so that they are refused."""
        for wake in self._compiling:
            wake.set()

    def cancel_all(self) -> None:
        """Cancel all answers in progress at once."""
        self.draining = True
        for answers in list(self.answers):
            answers.cancel()

    def stats(self) -> dict[str, Any]:
        """Return the figures of GET /stats; None for unknown ones, such as hit rates without a GPU
        cache."""
        engine = self.llm.stats()
        layers: list[float] | None = engine.get("expert_hit_rate")
        return {
            "model": self.name,
            "device": str(self.llm.device),
            "context": self.llm.context,
            "uptime_seconds": time.monotonic() - self.began,
            "draining": self.draining,
            "running": engine["running"],
            "waiting": engine["waiting"],
            "in_flight": self.in_flight,
            "max_batch": self.max_batch,
            "max_queue": self.config.limits.max_queue,
            "requests": engine["requests"],
            "prompt_tokens": engine["prompt_tokens"],
            "new_tokens": self.rate.total,
            "tokens_per_second": self.rate.per_second(),
            "time_to_first_token": engine["time_to_first_token"],
            "hit_rate": sum(layers) / len(layers) if layers else None,
            "hit_rate_per_layer": layers or None,
            "bytes_per_tier": engine["bytes"],
            "budget_per_tier": engine["budgets"],
            "gpu_reserved": engine["gpu_reserved"],
            "cache_bytes": engine["cache_bytes"],
            "kv_blocks": engine["kv_blocks"],
            "kv_blocks_free": engine["kv_blocks_free"],
        }

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def default_name(model: str) -> str:
    """Return the name of a model for clients: the last part of the path of a folder, the name of
    the run for a model of a run, or the full name of a repository of the hub."""
    path = Path(model).expanduser()
    return model_name(path) if path.exists() else model
