"""The serving loop: batches until all requests are done."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

import torch

from overspill.core.errors import NonFiniteError, OrderError
from overspill.core.interrupt import Condition, DeferredInterrupt
from overspill.serve.request import Request
from overspill.serve.runners import Runner
from overspill.serve.sampling import choose
from overspill.serve.scheduler import Scheduler, Work


class ServingLoop:
    """Computes batches. Any thread that waits for a request computes the next one, one at a time,
    and all requests of all threads are in it. What a batch changes is changed when it has
    succeeded, and not interrupted: Ctrl-C in one thread loses nothing of another's."""

    def __init__(self, runner: Runner, scheduler: Scheduler, ends: Collection[int]) -> None:
        """`ends` are the tokens that end a text."""
        self.runner = runner
        self.scheduler = scheduler
        self._ends = frozenset(ends)
        self._turn = threading.Lock()  # of the thread that changes requests
        self._inbox: deque[Callable[[], None]] = deque()  # what it does before the next batch
        self._waiting = threading.RLock()
        self._turn_ended = Condition(self._waiting)
        self._closed = False
        self.stats = Stats()

    def add(self, request: Request) -> None:
        self._inbox.append(partial(self.scheduler.add, request))

    def remove(self, request: Request) -> None:
        """Takes effect before the next batch. Does not wait for this one: the garbage collector
        may end a stream in the thread that computes it."""
        self._inbox.append(partial(self._remove, request))

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.runner.forget(request)

    def close(self) -> None:
        """Requests that wait end with an error, when the batch that is computed has ended."""
        self._closed = True
        with self._turn:
            self._step()
            self.runner.close()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Computes batches until `done`; other threads may compute some of them."""
        while not done():
            taken: list[bool] = []
            try:
                # taken and noted in one call: Ctrl-C comes before or after it
                taken.extend(map(self._turn.acquire, (False,)))
                if taken[0] and not done():
                    self._step()
            finally:
                if taken and taken[0]:  # no call: Ctrl-C comes after calls
                    self._turn.release()
                    with self._waiting:
                        self._turn_ended.notify_all()
            with self._waiting:
                if not taken[0] and self._turn.locked() and not done():
                    self._turn_ended.wait()

    def _step(self) -> None:
        with DeferredInterrupt():
            while self._inbox:
                self._inbox.popleft()()
            if self._closed:
                requests = [*self.scheduler.running, *self.scheduler.waiting]
                self._fail(requests, OrderError("this LLM was closed; make a new one"))
                return
            batch = self.scheduler.next_batch()
        assert batch, "a request waits, but nothing can be computed"
        try:
            with torch.inference_mode():
                self._compute(batch)
        except Exception as error:  # a model may raise anything
            with DeferredInterrupt():
                self._fail([work.request for work in batch], error)

    def _fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            self._remove(request)
            if not request.finished:
                request.fail(error)

    def _compute(self, batch: list[Work]) -> None:
        began = time.perf_counter()
        logits = self.runner.run(batch)
        with DeferredInterrupt():
            ready = [n for n, work in enumerate(batch) if work.n_tokens == work.request.pending]
            requests = [batch[number].request for number in ready]
            tokens: list[int | None] = []
            logprobs: list[dict[int, float] | None] = []
            if ready:
                chosen = logits if len(ready) == len(batch) else logits[ready]
                params, generators = [r.params for r in requests], [r.generator for r in requests]
                tokens, logprobs = choose(chosen, params, generators)
            self.stats.count(batch, time.perf_counter() - began)
            for work in batch:
                self.scheduler.computed(work)
            for request, token, logs in zip(requests, tokens, logprobs, strict=True):
                self._append(request, token, logs)

    def _append(self, request: Request, token: int | None, logs: dict[int, float] | None) -> None:
        if token is None:
            problem = "the model's output is NaN or infinite for this prompt; check its weights"
            self._fail([request], NonFiniteError(problem))
            return
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
        self.waits: deque[float] = deque(maxlen=1000)  # until the first token, the last ones

    def count(self, batch: list[Work], seconds: float) -> None:
        """Called before the tokens of the batch are counted as computed."""
        new = [request.computed >= request.prompt_tokens for request, _ in batch]
        self.prompt_tokens += sum(
            min(count, request.prompt_tokens - request.computed)
            for (request, count), is_new in zip(batch, new, strict=True)
            if not is_new
        )
        if all(new) and all(count == 1 for _, count in batch):
            self.decode_seconds += seconds
            self.decode_tokens += len(batch)

    def finish(self, request: Request) -> None:
        self.requests += 1
        self.new_tokens += len(request.new_tokens)
        if request.first_token_at is not None:
            self.waits.append(request.first_token_at - request.asked_at)
