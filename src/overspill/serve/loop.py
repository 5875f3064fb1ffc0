"""The serving loop: batches until all requests are done."""

import threading
import time
from collections.abc import Callable, Collection

import torch

from overspill.core.errors import OrderError, OverspillError
from overspill.serve.request import Request
from overspill.serve.runners import Runner
from overspill.serve.sampling import choose
from overspill.serve.scheduler import Scheduler, Work


class ServingLoop:
    """Computes batches. Any thread that waits for a request runs the next one, one at a time, and
    all requests of all threads are in it. What a batch changes is changed when it has succeeded:
    an interrupt in one thread loses nothing of another's."""

    def __init__(self, runner: Runner, scheduler: Scheduler, ends: Collection[int]) -> None:
        """`ends` are the tokens that end a text."""
        self.runner = runner
        self.scheduler = scheduler
        self._ends = frozenset(ends)
        self._lock = threading.Lock()
        self.stats = Stats()

    def add(self, request: Request) -> None:
        with self._lock:
            self.scheduler.add(request)

    def remove(self, request: Request) -> None:
        with self._lock:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.runner.forget(request)

    def close(self) -> None:
        """Requests that wait end with an error."""
        with self._lock:
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self._remove(request)
                request.fail(OrderError("the LLM was closed"))
            self.runner.close()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Computes batches until `done`; other threads may compute some of them."""
        while not done():
            with self._lock:
                if not done():
                    self._step()

    def _step(self) -> None:
        batch = self.scheduler.next_batch()
        assert batch, "a request waits, but nothing can be computed"
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                self._compute(batch)
        except (OverspillError, OSError, RuntimeError) as error:
            for request, _ in batch:
                self._remove(request)
                request.fail(error)
            return
        self.stats.count(batch, time.perf_counter() - began)

    def _compute(self, batch: list[Work]) -> None:
        logits = self.runner.run(batch)
        ready = [n for n, work in enumerate(batch) if work.n_tokens == work.request.pending]
        requests = [batch[number].request for number in ready]
        tokens: list[int] = []
        logprobs: list[dict[int, float] | None] = []
        if ready:
            chosen = logits if len(ready) == len(batch) else logits[ready]
            params, generators = [r.params for r in requests], [r.generator for r in requests]
            tokens, logprobs = choose(chosen, params, generators)
        for work in batch:
            self.scheduler.computed(work)
        for request, token, logs in zip(requests, tokens, logprobs, strict=True):
            end = token in self._ends and not request.params.ignore_eos
            request.append(token, logs, end)
            if request.finished:
                self._remove(request)
                self.stats.finish(request)


class Stats:
    """What was served so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.new_tokens = 0
        self.decode_seconds = 0.0
        self.decode_tokens = 0
        self.waits: list[float] = []  # until the first token

    def count(self, batch: list[Work], seconds: float) -> None:
        self.prompt_tokens += sum(count for _, count in batch if count > 1)
        if all(count == 1 for _, count in batch):
            self.decode_seconds += seconds
            self.decode_tokens += len(batch)

    def finish(self, request: Request) -> None:
        self.requests += 1
        self.new_tokens += len(request.new_tokens)
        if request.first_token_at is not None:
            self.waits.append(request.first_token_at - request.asked_at)
