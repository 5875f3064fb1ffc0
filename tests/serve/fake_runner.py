"""A tiny deterministic model whose next batch can begin early, in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.serve.runners import Runner
from overspill.serve.sampling import Draw, choose
from overspill.serve.scheduler import BatchItem

VOCABULARY = 13
_TABLE = torch.randn(101, VOCABULARY, generator=torch.Generator().manual_seed(0))


def logits_after(tokens: Sequence[int]) -> Tensor:
    """They depend on every token and its position."""
    number = 7
    for token in tokens:
        number = (31 * number + token + 1) % len(_TABLE)
    return _TABLE[number]


def greedy(prompt: Sequence[int], count: int, ends: frozenset[int] = frozenset()) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(logits_after(tokens).argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


class FakeRunner(Runner):
    """Sees only what is in the slots of a request's blocks, as attention does. `early`: batches
    can begin before the host knows their tokens. Batches of one token each draw the next ones, into
    memory that the batch after them overwrites."""

    def __init__(self, n_blocks: int, size: int, early: bool = True) -> None:
        self._slots = torch.full((n_blocks, size), -1)
        self._size = size
        self._early = early
        self._drawn = torch.zeros(64, dtype=torch.int64)
        self.began_early = 0
        self.asked_early = 0
        self.paused = 0
        self.closed = False
        self.fail_early: dict[int, BaseException] = {}
        """What the n-th call of `continue_with` raises."""
        self.fail_late: dict[int, BaseException] = {}
        """The same, when the batch has begun."""
        self.failures: list[Exception] = []
        """What `check` raises."""
        self.fail_beside: dict[int, Exception] = {}
        """What the batch of the n-th call of `continue_with` adds to them."""

    def run(self, batch: Sequence[BatchItem]) -> Tensor:
        rows = []
        for request, count in batch:
            assert request.blocks, "a request that has ended is computed"
            end = request.computed + count
            for at in range(request.computed, end):
                self._write(request.blocks, at, request.tokens[at])
            rows.append(self._logits(request.blocks, end))
        self.chosen = None
        if all(count == 1 for _, count in batch):
            self._draw(torch.stack(rows), [request.draw() for request, _ in batch])
        return torch.stack(rows)

    def continue_with(self, batch: Sequence[BatchItem], tokens_N: Tensor) -> Tensor | None:
        self.asked_early += 1
        if self.asked_early in self.fail_early:
            raise self.fail_early[self.asked_early]
        if not self._early:
            return None
        assert all(count == 1 for _, count in batch)
        self.began_early += 1
        if self.asked_early in self.fail_beside:
            self.failures.append(self.fail_beside[self.asked_early])
        rows = []
        for (request, _), token in zip(batch, tokens_N.tolist(), strict=True):
            self._write(request.blocks, request.computed + 1, token)
            rows.append(self._logits(request.blocks, request.computed + 2))
        self._draw(torch.stack(rows), [request.draw(1) for request, _ in batch])
        if self.asked_early in self.fail_late:
            raise self.fail_late[self.asked_early]
        return torch.stack(rows)

    def _draw(self, logits: Tensor, draws: Sequence[Draw]) -> None:
        tokens, found = choose(logits, draws)  # the second is copied before the next batch
        self._drawn[: len(draws)] = tokens
        self.chosen = self._drawn[: len(draws)], found

    def _write(self, blocks: Sequence[int], at: int, token: int) -> None:
        self._slots[blocks[at // self._size], at % self._size] = token

    def _logits(self, blocks: Sequence[int], end: int) -> Tensor:
        return logits_after(self._slots[list(blocks)].flatten()[:end].tolist())

    def check(self) -> None:
        if self.failures:
            raise self.failures.pop()

    def discard(self) -> None:
        self.failures.clear()

    def pause(self) -> None:
        self.paused += 1

    def close(self) -> None:
        self.closed = True
