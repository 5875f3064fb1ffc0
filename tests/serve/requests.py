"""Requests without a model: a scheduler that is told which tokens were chosen."""

from collections.abc import Sequence

import torch

from overspill.serve.blocks import BlockPool
from overspill.serve.params import SamplingParams
from overspill.serve.request import Request
from overspill.serve.scheduler import BatchItem, Scheduler
from overspill.serve.text import TextStream

CPU = torch.device("cpu")


def make_request(prompt: Sequence[int], max_tokens: int = 4) -> Request:
    return Request(prompt, SamplingParams(max_tokens=max_tokens), TextStream(None), max_tokens)


class Simulated:
    """A cache that remembers of each slot the tokens of which its content was computed, and checks
    before each pass that a request reads its own."""

    def __init__(
        self, n_blocks: int, size: int, max_batch: int = 4, chunk: int = 8, split: bool = True
    ) -> None:
        self.pool = BlockPool(n_blocks, size, share=split)
        self.scheduler = Scheduler(self.pool, max_batch, chunk, split)
        self.max_batch, self.chunk, self.size = max_batch, chunk, size
        self.computed = 0  # tokens in all passes
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}

    @property
    def requests(self) -> list[Request]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def step(self, interrupted: bool = False, prompts: bool = True) -> list[BatchItem]:
        """One batch; an interrupted one is computed, but not recorded."""
        batch = self.scheduler.next_batch(prompts)
        self._check(batch)
        for request, count in batch:
            self._compute(request, count)
        if not interrupted:
            for work in batch:
                self.scheduler.computed(work)
                if work.request.pending == 0:
                    # depends on all tokens, so that requests with one prompt stay alike
                    work.request.append(sum(work.request.tokens) % 3, None, end=False)
                if work.request.finished:
                    self.scheduler.remove(work.request)
        self.pool.check_conserved()
        return batch

    def _check(self, batch: list[BatchItem]) -> None:
        scheduler = self.scheduler
        assert len(scheduler.running) <= self.max_batch
        chosen = [request for request, _ in batch]
        assert len(set(chosen)) == len(chosen), "a request is in a batch twice"
        assert set(chosen) <= set(scheduler.running)
        assert all(1 <= count <= request.pending for request, count in batch)
        assert sum(count for request, count in batch if request.pending > 1) <= self.chunk
        assert not any(request.blocks for request in scheduler.waiting)
        for request in scheduler.running:
            assert len(set(request.blocks)) == len(request.blocks)

    def _compute(self, request: Request, count: int) -> None:
        for at in range(request.computed + count):
            slot = request.blocks[at // self.size], at % self.size
            before = tuple(request.tokens[: at + 1])
            if at < request.computed:
                assert self._slots[slot] == before, "a request reads what another one wrote"
                continue
            users = [each for each in self.scheduler.running if slot[0] in each.blocks]
            assert users == [request], "two requests write one block"
            self._slots[slot] = before
        self.computed += count
