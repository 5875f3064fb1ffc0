"""The serving loop: batches until all requests are done."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from overspill.core.errors import DiskError, NonFiniteError, OrderError, OverspillError
from overspill.core.interrupt import Condition, DeferredInterrupt
from overspill.plan.pieces import PieceSizes
from overspill.serve.pacing import Pacing
from overspill.serve.request import Request
from overspill.serve.runners import Runner
from overspill.serve.sampling import Choice
from overspill.serve.scheduler import BatchItem, Scheduler, prompt_tokens
from overspill.serve.stats import Stats

_log = logging.getLogger("overspill")
_FEWEST = 16
"""Tokens of a piece of a prompt if memory is short."""


@dataclass
class RunningBatch:
    """Batch that is being computed."""

    batch: list[BatchItem]
    requests: list[Request]
    """Requests that get a token."""
    choice: Choice | None
    """The tokens of these requests; None if there are none."""
    began: float


class ServingLoop:
    """Computes batches, one at a time, with the requests of all threads. Any thread that waits for
    a request computes the next batch. Requests change only when a batch has succeeded, and without
    interruption: Ctrl-C in one thread loses no result of another thread.

    Where the runner can, the next batch begins on the device before the host has read the tokens of
    this one; a request that ends with these tokens is computed once too often."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        ends: Collection[int],
        stream: torch.cuda.Stream | None = None,
        pacing: Pacing | None = None,
        pieces: PieceSizes | None = None,
    ) -> None:
        """`ends` are the tokens that end a text. All batches are computed on `stream`: threads may
        have different current streams, and a batch may begin before the last one has ended. Without
        `pacing`, prompts never wait for answers. Without `pieces`, the limit of prompt tokens in a
        batch is always that of the scheduler."""
        self.runner = runner
        self._stream = stream
        self._pieces = pieces or PieceSizes(scheduler.chunk, scheduler.chunk)
        self._on_stream: Callable[[], AbstractContextManager[object]] = (
            nullcontext if stream is None else partial(torch.cuda.stream, stream)
        )
        self.scheduler = scheduler
        self._pacing = pacing or Pacing(0)
        self._ends = frozenset(ends)
        self._turn = threading.Lock()  # held by the thread that changes requests
        self._owner: int | None = None  # that thread
        self._inbox: deque[Callable[[], None]] = deque()  # changes before the next batch
        self._arriving: set[Request] = set()  # requests that the inbox adds
        self._waiting = threading.RLock()
        self._turn_ended = Condition(self._waiting)
        self._closed = False
        self._ahead: RunningBatch | None = None  # the batch after the last one that has ended
        self._abandoned = False  # a batch whose results are not used may still run, and fail
        self._last_end = 0.0
        self.stats = Stats()

    def add(self, request: Request) -> None:
        """Add a request before the next batch."""
        self._arriving.add(request)
        self._inbox.append(partial(self._add, request))

    def _add(self, request: Request) -> None:
        if not request.finished:
            self.scheduler.add(request)
        self._arriving.discard(request)

    def remove(self, request: Request) -> None:
        """Remove a request before the next batch. Does not wait for this batch: the garbage
        collector may end a stream in the thread that computes it."""
        self.cancel(request)
        if not self._turn.locked():  # no thread waits: nothing may follow for a while
            self.runner.pause()

    def restart(self) -> None:
        """Compute running requests again, from the next batch on: keys and values are void."""
        self._inbox.append(self._restart)

    def _restart(self) -> None:
        self._abandoned = self._abandoned or self._ahead is not None
        self._ahead = None
        for request in self.scheduler.running:
            self.runner.forget(request)
        self.scheduler.restart()

    def cancel(self, request: Request) -> None:
        """Remove a request before the next batch. Only for callers that know of a thread which
        computes the next batch or looks at `has_changes`; others call `remove`."""
        self._inbox.append(partial(self._remove, request))

    @property
    def has_changes(self) -> bool:
        """Whether requests were added or removed since the last batch began."""
        return bool(self._inbox)

    @property
    def n_waiting(self) -> int:
        """Number of requests that do not run yet."""
        return len(self.scheduler.waiting) + len(self._arriving)

    @property
    def computes_here(self) -> bool:
        """Whether this thread computes a batch, and so must not wait for one."""
        return self._owner == threading.get_ident()

    def check_may_wait(self, what: str) -> None:
        """Raise in callbacks of requests, which a batch waits for."""
        if self.computes_here:
            raise OrderError(
                f"{what} waits for batches, which wait for this callback; call it in another "
                "thread, or use submit"
            )

    def fail(self, requests: list[Request], error: Exception) -> None:
        """End requests with an error, when the current batch has ended."""
        with self._whole_turn():
            self._fail(requests, error)

    @contextmanager
    def _whole_turn(self) -> Iterator[None]:
        """Context after the current batch in which no other begins."""
        with self._turn:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.runner.forget(request)

    def close(self) -> None:
        """End all requests with an error, when the current batch has ended."""
        self.check_may_wait("close")
        self._closed = True
        with self._whole_turn():
            try:
                self._step()
            finally:
                self.runner.close()
                self.scheduler.pool.forget()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Compute batches until `done`; other threads may compute some of them."""
        self.check_may_wait("this")
        while not done():
            taken: list[bool] = []
            try:
                # taken and noted in one call: Ctrl-C comes before or after it
                taken.extend(map(self._turn.acquire, (False,)))
                if taken[0] and not done():
                    self._owner = threading.get_ident()
                    self._step()
            finally:
                if taken and taken[0]:  # no call: Ctrl-C comes after calls
                    self._owner = None
                    self._turn.release()
                    with self._waiting:
                        self._turn_ended.notify_all()
            with self._waiting:
                if not taken[0] and self._turn.locked() and not done():
                    self._turn_ended.wait()

    def _step(self) -> None:
        """Apply the changes of the inbox, and compute a batch."""
        with DeferredInterrupt():
            while self._inbox:
                self._inbox.popleft()()
            if self._closed:
                self._ahead = None
                requests = [*self.scheduler.running, *self.scheduler.waiting]
                self._fail(requests, OrderError("this LLM was closed; make a new one"))
                return
            prompts = self.scheduler.has_prompts
            self._follow_weights(prompts and self._ahead is None)
            now = self._ahead
            if now is None:
                if prompts:
                    self.scheduler.chunk = self._pieces.size(self.runner.room())
                batch = self.scheduler.next_batch(self._pacing.allows_prompts)
            else:
                batch = now.batch
        if batch:
            self._compute(batch, now)
            return
        assert not self.scheduler.waiting, "a request waits, but nothing can be computed"
        self.runner.pause()  # all were cancelled

    def _follow_weights(self, dense: bool) -> None:
        """Compute running requests again if weights have changed since the last batch. Dense
        weights are compared before prompts only: it takes as long as a part of a decoding step."""
        scheduler = self.scheduler
        try:
            changed = self.runner.weights_changed(thorough=dense)
        except Exception as error:  # of updates that it waits for
            self._fail([*scheduler.running, *scheduler.waiting], error)
            changed = True
        if changed:
            self._restart()

    def _compute(
        self, batch: list[BatchItem], now: RunningBatch | None, early: bool = True
    ) -> None:
        """Compute a batch, or the rest of one that has begun (`now`). If an expert cannot be read,
        each request of the batch is tried alone: requests that do not need it continue. Without
        `early`, no batch begins before this one has ended."""
        following: RunningBatch | None = None
        try:
            with torch.inference_mode(), self._on_stream():
                began = time.perf_counter()
                logits = self._run(batch) if now is None else None
                with DeferredInterrupt():
                    if logits is not None:
                        now = self._choose(batch, logits, began)
                    assert now is not None
                    # until the tokens of this batch are appended: the next one overwrites them
                    self._ahead, self._abandoned = None, True
                    following = self._begin_next(now) if early else None
                    self._end(now)
                    self._ahead = following if self.scheduler.running else None
                    self._abandoned = following is not self._ahead
        except Exception as error:  # a model may raise anything
            with DeferredInterrupt():
                self._ahead, self._abandoned = None, True
                if isinstance(error, torch.OutOfMemoryError) and self._save_memory(batch):
                    return  # the next batch has the same requests
                # the batch that has begun early may have failed instead
                alone = len(batch) == 1 and following is None
                if alone or not isinstance(error, DiskError):
                    requests = [item.request for item in batch]
                    if isinstance(error, torch.OutOfMemoryError):  # answers fit without prompts
                        prompts = [request for request in requests if request.pending > 1]
                        requests = prompts or requests
                    self._fail(requests, error)
                    return
        else:
            return
        for item in batch:
            if item.request in self.scheduler.running:
                self._compute([item], None, early=False)

    def _save_memory(self, batch: list[BatchItem]) -> bool:
        """Make the next batch smaller, or free memory, after a batch did not fit; return False if
        neither is possible."""
        tokens = prompt_tokens(batch)
        _log.info("a batch with %d tokens of prompts did not fit into memory", tokens)
        if not self.scheduler.split:
            return self.runner.free_memory()
        return (
            self._pieces.shrink(tokens)
            or self.runner.free_memory()
            or self._pieces.shrink(tokens, _FEWEST)
        )

    def _run(self, batch: list[BatchItem]) -> Tensor:
        if self._abandoned:
            self.runner.discard()
            self._abandoned = False
        return self.runner.run(batch)

    def _fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            self._remove(request)
            if not request.finished:
                request.fail(error)

    def _choose(self, batch: list[BatchItem], logits: Tensor, began: float) -> RunningBatch:
        """Choose the next tokens of the requests whose tokens are all computed by the batch."""
        ready = [n for n, item in enumerate(batch) if item.n_tokens == item.request.pending]
        requests = [batch[number].request for number in ready]
        if not ready:
            return RunningBatch(batch, requests, None, began)
        draws = [request.draw() for request in requests]
        if len(ready) == len(batch):
            return RunningBatch(batch, requests, Choice(logits, draws, self.runner.chosen), began)
        return RunningBatch(batch, requests, Choice(logits[ready], draws), began)

    def _begin_next(self, now: RunningBatch) -> RunningBatch | None:
        """Begin the batch after `now` on the device, if it has the same requests."""
        choice, scheduler = now.choice, self.scheduler
        if choice is None or choice.needs_host or self._inbox:
            return None
        if scheduler.may_join and self._pacing.allows_prompts:
            return None
        alive = [request for request in now.requests if not request.finished]
        if alive != scheduler.running or len(alive) != len(now.batch):
            return None
        if any(item.n_tokens != 1 for item in now.batch):
            return None
        if any(request.is_last for request in alive) or not scheduler.reserve_next(alive):
            return None
        logits = self.runner.continue_with(now.batch, choice.tokens_N)
        if logits is None:
            return None
        draws = [request.draw(1) for request in alive]
        choice = Choice(logits, draws, self.runner.chosen)
        return RunningBatch(now.batch, alive, choice, time.perf_counter())

    def _end(self, now: RunningBatch) -> None:
        """Wait for the tokens of a batch, record it, and give the tokens to the requests."""
        tokens: list[int | None] = []
        logprobs: list[dict[int, float] | None] = []
        if now.choice is not None:
            tokens = now.choice.tokens()
            self.runner.check()
            logprobs = now.choice.logprobs(tokens)
        elif self._stream is not None:  # a piece of a prompt: its time is measured too
            self._stream.synchronize()
        # some requests may have ended or been cancelled since the batch began
        batch = [item for item in now.batch if item.request in self.scheduler.running]
        end = time.perf_counter()
        seconds = end - max(now.began, self._last_end)
        self.stats.count(batch, seconds)
        self._pacing.record(batch, seconds)
        if tokens_of_prompts := prompt_tokens(now.batch):
            self._pieces.record(tokens_of_prompts, seconds)
        self._last_end = end
        for item in batch:
            self.scheduler.computed(item)
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
        try:
            request.append(token, logs, end)
        except OverspillError as error:
            self._fail([request], error)
            return
        if request.finished:
            self._remove(request)
            self.stats.finish(request)
