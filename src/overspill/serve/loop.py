"""The serving loop: batches until all requests are done."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from overspill.core.errors import DiskError, NonFiniteError, OrderError
from overspill.core.interrupt import Condition, DeferredInterrupt
from overspill.serve.request import Request
from overspill.serve.runners import Runner
from overspill.serve.sampling import Choice
from overspill.serve.scheduler import Scheduler, Work


@dataclass
class Pass:
    """A batch that is being computed."""

    batch: list[Work]
    requests: list[Request]
    """Those that get a token."""
    choice: Choice | None
    """Their tokens; None if there are none."""
    began: float


class ServingLoop:
    """Computes batches. Any thread that waits for a request computes the next one, one at a time,
    and all requests of all threads are in it. What a batch changes is changed when it has
    succeeded, and not interrupted: Ctrl-C in one thread loses nothing of another's.

    Where the runner can, the next batch begins on the device before the host has read the tokens of
    this one; a request that ends with them is computed once too often."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        ends: Collection[int],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`ends` are the tokens that end a text. All batches are computed on `stream`: threads may
        have different current ones, and a batch may begin before the last one has ended."""
        self.runner = runner
        self._on_stream: Callable[[], AbstractContextManager[object]] = (
            nullcontext if stream is None else partial(torch.cuda.stream, stream)
        )
        self.scheduler = scheduler
        self._ends = frozenset(ends)
        self._turn = threading.Lock()  # of the thread that changes requests
        self._inbox: deque[Callable[[], None]] = deque()  # what it does before the next batch
        self._waiting = threading.RLock()
        self._turn_ended = Condition(self._waiting)
        self._closed = False
        self._ahead: Pass | None = None  # the batch after the last one that has ended
        self._given_up = False  # a batch that nobody wants any more may still be computed, and fail
        self._last_end = 0.0
        self.stats = Stats()

    def add(self, request: Request) -> None:
        self._inbox.append(partial(self.scheduler.add, request))

    def remove(self, request: Request) -> None:
        """Takes effect before the next batch. Does not wait for this one: the garbage collector
        may end a stream in the thread that computes it."""
        self._inbox.append(partial(self._remove, request))
        if not self._turn.locked():  # given up: nothing may follow for a while
            self.runner.pause()

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
                self._ahead = None
                requests = [*self.scheduler.running, *self.scheduler.waiting]
                self._fail(requests, OrderError("this LLM was closed; make a new one"))
                return
            now = self._ahead
            batch = self.scheduler.next_batch() if now is None else now.batch
        assert batch, "a request waits, but nothing can be computed"
        self._compute(batch, now)

    def _compute(self, batch: list[Work], now: Pass | None, early: bool = True) -> None:
        """If an expert cannot be read, each request of the batch is tried alone: those that do not
        need it continue. Without `early`, no batch begins before this one has ended."""
        following: Pass | None = None
        try:
            with torch.inference_mode(), self._on_stream():
                began = time.perf_counter()
                logits = self._run(batch) if now is None else None
                with DeferredInterrupt():
                    if logits is not None:
                        now = self._choose(batch, logits, began)
                    assert now is not None
                    # until the tokens of this batch are appended: the next one overwrites them
                    self._ahead, self._given_up = None, True
                    following = self._begin_next(now) if early else None
                    self._end(now)
                    self._ahead = following if self.scheduler.running else None
                    self._given_up = following is not self._ahead
        except Exception as error:  # a model may raise anything
            with DeferredInterrupt():
                self._ahead, self._given_up = None, True
                # what has begun early may be what has failed
                alone = len(batch) == 1 and following is None
                if alone or not isinstance(error, DiskError):
                    self._fail([work.request for work in batch], error)
                    return
        else:
            return
        for work in batch:
            if work.request in self.scheduler.running:
                self._compute([work], None, early=False)

    def _run(self, batch: list[Work]) -> Tensor:
        if self._given_up:
            self.runner.discard()
            self._given_up = False
        return self.runner.run(batch)

    def _fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            self._remove(request)
            if not request.finished:
                request.fail(error)

    def _choose(self, batch: list[Work], logits: Tensor, began: float) -> Pass:
        ready = [n for n, work in enumerate(batch) if work.n_tokens == work.request.pending]
        requests = [batch[number].request for number in ready]
        if not ready:
            return Pass(batch, requests, None, began)
        draws = [request.draw() for request in requests]
        if len(ready) == len(batch):
            return Pass(batch, requests, Choice(logits, draws, self.runner.chosen), began)
        return Pass(batch, requests, Choice(logits[ready], draws), began)

    def _begin_next(self, now: Pass) -> Pass | None:
        """Begins the batch after `now`, if it has the same requests."""
        choice, scheduler = now.choice, self.scheduler
        if choice is None or choice.needs_logits or self._inbox or scheduler.may_join:
            return None
        alive = [request for request in now.requests if not request.finished]
        if alive != scheduler.running or len(alive) != len(now.batch):
            return None
        if any(work.n_tokens != 1 for work in now.batch):
            return None
        if any(request.is_last for request in alive) or not scheduler.reserve_next(alive):
            return None
        logits = self.runner.continue_with(now.batch, choice.tokens_N)
        if logits is None:
            return None
        draws = [request.draw(1) for request in alive]
        return Pass(
            now.batch, alive, Choice(logits, draws, self.runner.chosen), time.perf_counter()
        )

    def _end(self, now: Pass) -> None:
        tokens: list[int | None] = []
        logprobs: list[dict[int, float] | None] = []
        if now.choice is not None:
            tokens = now.choice.tokens()
            self.runner.check()
            logprobs = now.choice.logprobs(tokens)
        # some may have ended, or are not wanted any more, since the batch began
        batch = [work for work in now.batch if work.request in self.scheduler.running]
        end = time.perf_counter()
        self.stats.count(batch, end - max(now.began, self._last_end))
        self._last_end = end
        for work in batch:
            self.scheduler.computed(work)
        for request, token, logs in zip(now.requests, tokens, logprobs, strict=True):
            if request in self.scheduler.running:
                self._append(request, token, logs)
        if not self.scheduler.running and not self.scheduler.waiting:
            self.runner.pause()

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
