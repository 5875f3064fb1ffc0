"""Which experts stay in GPU slots, if a cache of them is smaller than what is used.

A policy gives each expert a score after each token; experts with the lowest scores are evicted.
Scores do not depend on the size of the cache, and those of several layers can be compared: slots
may belong to a layer or be shared by all. An engine that learns the routing of all layers at once
has one policy; one that decides layer by layer has a policy of one layer for each.

Shapes: T tokens, L layers, E experts of a layer, N needed experts of a layer; ids may repeat.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]


class Policy(ABC):
    """Scores of experts, updated with each token (or with each batch of one token per request)."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.scores_LE: Floats = np.full((n_layers, n_experts), -np.inf)
        self._rows_L1 = np.arange(n_layers)[:, None]

    @abstractmethod
    def use(self, experts_LN: Ids) -> None:
        """These experts were needed now."""


class LRU(Policy):
    """Evicts the expert that was not used for the longest time."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        super().__init__(n_layers, n_experts)
        self._time = 0

    def use(self, experts_LN: Ids) -> None:
        self.scores_LE[self._rows_L1, experts_LN] = self._time
        self._time += 1


class LFU(Policy):
    """Evicts the expert that was used least; a use counts less with every token after it."""

    def __init__(self, n_layers: int, n_experts: int, decay: float = 0.97) -> None:
        super().__init__(n_layers, n_experts)
        self.scores_LE = np.zeros((n_layers, n_experts))
        self._decay = decay

    def use(self, experts_LN: Ids) -> None:
        self.scores_LE *= self._decay
        self.scores_LE[self._rows_L1, experts_LN] += 1


class NextUse(Policy):
    """Evicts the expert whose next use is predicted to be the farthest; learns while it is used.

    The value of an expert is the expectation of `discount ** (tokens before its next use)`. Its
    log-odds, the score, are predicted from how often the expert was used of late, and from which
    experts of the layer were used by this token and by the token before: each of them has a weight
    for each expert. The weights are learned with temporal differences: if the expert is used by the
    next token the value should have been 1, otherwise `discount` times its value after that token.
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        *,
        discount: float = 0.85,
        decay: float = 0.98,
        rate: float = 0.4,
    ) -> None:
        super().__init__(n_layers, n_experts)
        self._discount, self._decay, self._rate = discount, decay, rate
        self._share_LE = np.zeros((n_layers, n_experts), np.float32)  # of the last tokens
        # rows of weights: the experts of this token, then those of the token before
        self._weights_LCE = np.zeros((n_layers, 2 * n_experts, n_experts), np.float32)
        self._now_LN: Ids = np.zeros((n_layers, 0), np.intp)
        self._context_LC: Ids = np.zeros((n_layers, 0), np.intp)  # rows of weights in use
        self._value_LE: Floats = np.zeros((n_layers, n_experts), np.float32)

    def use(self, experts_LN: Ids) -> None:
        rows_L1, n_experts = self._rows_L1, self._share_LE.shape[1]
        self._share_LE *= self._decay
        self._share_LE[rows_L1, experts_LN] += 1 - self._decay
        context_LC = np.concatenate((experts_LN, self._now_LN + n_experts), axis=1)
        # the mean, so that the number of requests in a batch may change
        sum_LE = self._weights_LCE[rows_L1, context_LC].sum(axis=1)
        learned_LE = sum_LE / max(1, context_LC.shape[1])
        self.scores_LE = learned_LE + 0.5 * np.log(self._share_LE + np.float32(0.01))
        value_LE = 1 / (1 + np.exp(-self.scores_LE))
        target_LE = self._discount * value_LE
        target_LE[rows_L1, experts_LN] = 1
        step_LE = self._rate * (target_LE - self._value_LE)
        self._weights_LCE[rows_L1, self._context_LC] += step_LE[:, None]
        self._context_LC, self._value_LE = context_LC, value_LE
        self._now_LN = context_LC[:, : experts_LN.shape[1]]


class Belady(Policy):
    """Evicts the expert whose next use is the farthest: the optimum, which needs the future (and
    distinct experts: one that several requests of a batch need is as good as any other)."""

    def __init__(self, n_experts: int, future_TLN: Ids) -> None:
        n_tokens, n_layers, _ = future_TLN.shape
        super().__init__(n_layers, n_experts)
        self._next_TLN = np.full(future_TLN.shape, n_tokens)
        last_LE = np.full((n_layers, n_experts), n_tokens)
        for token in reversed(range(n_tokens)):
            self._next_TLN[token] = last_LE[self._rows_L1, future_TLN[token]]
            last_LE[self._rows_L1, future_TLN[token]] = token
        self._time = 0

    def use(self, experts_LN: Ids) -> None:
        self.scores_LE[self._rows_L1, experts_LN] = -self._next_TLN[self._time]
        self._time += 1


def retained(
    scores_LE: Floats, cached_LE: Mask, needed_LE: Mask, room: int, *, optional: bool = False
) -> Mask:
    """What is in a cache of `room` experts a layer after `needed_LE` were used: of these and of the
    cached, those with the highest scores. Needed experts come first, or with `optional`, where
    they can be used without a GPU slot, have to have a higher score than others too.

    Slots that all layers share are those of a single layer: give arrays of one row."""
    rank_LE = (cached_LE | needed_LE).astype(np.int8)
    if not optional:
        rank_LE += needed_LE
    # sorted by rank, then by score; of equal experts the first in the row is evicted first
    order_LE = np.lexsort((scores_LE, rank_LE))
    kept_LE = np.zeros_like(cached_LE)
    np.put_along_axis(kept_LE, order_LE[:, max(0, order_LE.shape[1] - room) :], True, axis=1)
    return kept_LE & (rank_LE > 0)


def hit_rates(
    policy: Policy,
    trace_TLN: Ids,
    rooms: Sequence[int],
    *,
    optional: bool = False,
    shared: bool = False,
) -> Floats:
    """The share of needed experts that were in the cache, [layers, rooms], with each of `rooms` as
    the GPU slots of a layer; with `shared`, all layers share them. Caches are empty at first."""
    n_tokens, n_layers, n_needed = trace_TLN.shape
    n_rows = 1 if shared else n_layers
    rows_L1 = np.arange(n_layers)[:, None]
    cached = [np.zeros(policy.scores_LE.shape, bool) for _ in rooms]
    hits: Floats = np.zeros((n_layers, len(rooms)))
    for experts_LN in trace_TLN:
        needed_LE = np.zeros_like(cached[0])
        needed_LE[rows_L1, experts_LN] = True
        policy.use(experts_LN)
        for index, room in enumerate(rooms):
            hits[:, index] += cached[index][rows_L1, experts_LN].sum(axis=1)
            kept = retained(
                policy.scores_LE.reshape(n_rows, -1),
                cached[index].reshape(n_rows, -1),
                needed_LE.reshape(n_rows, -1),
                room * n_layers // n_rows,
                optional=optional,
            )
            cached[index] = kept.reshape(needed_LE.shape)
    hits /= n_tokens * n_needed
    return hits
