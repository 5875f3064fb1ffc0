"""The choice of the tokens of a batch: requests join and leave between two batches."""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from overspill.serve.blocks import BlockPool
from overspill.serve.request import Request


class BatchItem(NamedTuple):
    """Next tokens of a request that a batch computes, the tokens of its source first."""

    request: Request
    n_tokens: int

    @property
    def n_new(self) -> int:
        """The number of tokens after the source."""
        return self.n_tokens - self.request.pending_source


def prompt_tokens(batch: Sequence[BatchItem]) -> int:
    """Return the number of prompt tokens in a batch that has not been recorded yet."""
    return sum(count for request, count in batch if request.pending > 1)


class Scheduler:
    """Waiting and running requests, and the choice of the next batch.

    A running request that has its next token computes one row. The rest of a batch goes to prompts,
    in order of arrival, in pieces if they are long: running requests continue meanwhile. Half of a
    batch is for short prompts that are complete with it, so they do not wait for a long one. If
    there are no blocks left, the request that came last gives its blocks back and is computed again
    later."""

    def __init__(
        self,
        pool: BlockPool,
        max_batch: int,
        chunk: int,
        split: bool = True,
        singly: bool = False,
    ) -> None:
        """At most `max_batch` requests run; a batch has at most `chunk` tokens of prompts. Without
        `split` a prompt is computed at once, and `chunk` must have room for the longest. With
        `singly`, an answer that is computed again is computed token by token, as the first time."""
        self.pool = pool
        self._singly = singly
        self.chunk = chunk
        self._max_batch = max_batch
        self.split = split
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended or was cancelled; no-op if it is not here."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        self._free(request)

    def restart(self) -> None:
        """Compute running requests again from their first token on: no result is valid any more."""
        for request in reversed(self.running.copy()):
            self._preempt(request)
        self.pool.forget()

    def next_batch(self, prompts: bool = True) -> list[BatchItem]:
        """Return the items that are computed next; empty if there are none. Without `prompts`, only
        requests that have their next token, if there are any."""
        batch: list[BatchItem] = []
        for request in list(self.running):
            if request.pending == 1 and self._reserve(request, 1):
                batch.append(BatchItem(request, 1))
        if batch and not prompts:
            return [item for item in batch if item.request in self.running]
        return self._with_prompts(batch)

    def _with_prompts(self, batch: list[BatchItem]) -> list[BatchItem]:
        left = self.chunk
        short = self._short_prompts()
        kept = sum(request.pending for request in short)
        for request in [each for each in self.running if each.pending > 1]:
            kept -= _take_out(short, request)
            count = self._part(request, left, kept)
            if count and self._reserve(request, count):
                batch.append(BatchItem(request, count))
                left -= count
        # a request may have given its blocks back after it was chosen
        batch = [item for item in batch if item.request in self.running]
        for request in list(self.waiting):
            if left <= 0 or len(self.running) == self._max_batch:
                break
            kept -= _take_out(short, request)
            count = self._begin(request, left, kept)
            if count:
                batch.append(BatchItem(request, count))
                left -= count
            elif left - kept > 0 or request.source:  # no room for it: it comes before all others
                break
        return batch

    def _short_prompts(self) -> list[Request]:
        """Return the prompts that fit completely into half of a batch, without the one that came
        first."""
        prompts = [each for each in self.running if each.pending > 1]
        prompts += itertools.islice(self.waiting, self._max_batch)
        short, left = [], self.chunk // 2
        for request in prompts[1:] if self.split else ():
            if request.pending <= left:
                short.append(request)
                left -= request.pending
        return short

    def _begin(self, request: Request, left: int, kept: int) -> int:
        """Let a waiting request run; return how many of its tokens are computed, 0 if there is no
        room for it."""
        if left <= kept and not request.source:
            return 0
        request.blocks = self.pool.share(request.tokens)
        request.computed = len(request.blocks) * self.pool.size
        if self.pool.needs_checkpoints:
            request.known = len(self.pool.find(request.tokens)) * self.pool.size
            if request.blocks:
                request.beginning = self.pool.states(request.blocks[-1])
        count = self._part(request, left, kept)
        # an answer that is computed again token by token would run out of blocks again
        again = request.has_answer and (self._singly or not self.split)
        if not count or not self._has_room(request, request.pending if again else count):
            self._free(request)
            return 0
        self.waiting.remove(request)
        self.running.append(request)
        if request.cached_tokens is None:  # later it may find its own blocks
            request.cached_tokens = request.computed
        self._reserve(request, count)
        return count

    @property
    def has_prompts(self) -> bool:
        """Whether a request of the next batch may have more to compute than its next token."""
        return self.may_join or any(request.pending > 1 for request in self.running)

    @property
    def may_join(self) -> bool:
        """Whether a request that waits may be in the next batch."""
        return bool(self.waiting) and len(self.running) < self._max_batch

    def _part(self, request: Request, left: int, kept: int) -> int:
        """Return how many tokens of a request are computed if there is room for `left`, of which
        `kept` are for others. Without `split` an answer that is computed again is computed as
        before, token by token. A source is computed at once, if need be alone."""
        if request.pending_source:
            least = request.pending_source + 1
            if least > left and left < self.chunk:
                return 0
            return min(request.pending, max(left - kept, least))
        left -= kept
        if self.split:
            prompt = request.prompt_tokens - request.computed
            return min((max(prompt, 1) if self._singly else request.pending), left)
        whole = 1 if request.computed else request.prompt_tokens
        return whole if whole <= left else 0

    def computed(self, item: BatchItem) -> None:
        """Record that the keys and values of these tokens are in the cache."""
        request, size = item.request, self.pool.size
        full = request.computed // size
        request.computed += item.n_new
        request.source_computed, request.beginning = True, None
        for number in range(full, request.computed // size):
            before = request.blocks[number - 1] if number else None
            tokens = request.tokens[number * size : (number + 1) * size]
            self.pool.fill(request.blocks[number], before, tokens)
            self._keep(request, number)

    def _keep(self, request: Request, number: int) -> None:
        """Keep the checkpoint of a full block, if the pass has made one. In an answer it replaces
        the checkpoint before it."""
        size = self.pool.size
        states = request.checkpoints.pop((number + 1) * size, None)
        if states is None or not self.pool.needs_checkpoints:
            return
        self.pool.keep(request.blocks[number], states)
        earlier = number - self.pool.checkpoints.answer_blocks
        if (earlier + 1) * size > request.prompt_tokens:
            self.pool.drop(request.blocks[earlier])

    def reserve_next(self, requests: Sequence[Request]) -> bool:
        """Take blocks for the token after the one that is being computed; return False, and take
        none, if there are not enough."""
        missing = [self._missing(request, 2) for request in requests]
        if sum(missing) > self.pool.n_free:
            return False
        for request, count in zip(requests, missing, strict=True):
            self._take(request, count)
        return True

    def _missing(self, request: Request, count: int) -> int:
        """Return how many blocks a request needs for `count` more tokens, those of its source
        first."""
        after = count - request.pending_source
        own = -(-(request.computed + after) // self.pool.size) - len(request.blocks)
        return own + self._missing_source(request)

    def _missing_source(self, request: Request) -> int:
        return -(-len(request.source) // self.pool.size) - len(request.source_blocks)

    def _has_room(self, request: Request, count: int) -> bool:
        return self._missing(request, count) <= self.pool.n_free

    def _reserve(self, request: Request, count: int) -> bool:
        """Take blocks for `count` more tokens; return False if the request had to give its own
        back."""
        if request not in self.running:
            return False
        while not self._has_room(request, count):
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        self._take(request, self._missing(request, count))
        return True

    def _take(self, request: Request, count: int) -> None:
        source = self._missing_source(request)
        for number in range(count):
            block = self.pool.take()
            assert block is not None
            (request.source_blocks if number < source else request.blocks).append(block)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self.pool.release(request.source_blocks)
        request.blocks, request.source_blocks = [], []
        request.computed, request.source_computed = 0, False
        request.beginning, request.known = None, 0
        request.checkpoints.clear()


def _take_out(requests: list[Request], request: Request) -> int:
    """Remove a request from a list; return its pending tokens, 0 if it was not there."""
    if request not in requests:
        return 0
    requests.remove(request)
    return request.pending
