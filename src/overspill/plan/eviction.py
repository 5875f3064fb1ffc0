"""The choice of experts that stay in GPU slots, if a cache of them is smaller than the experts in
use.

A policy gives each expert a score after each token; experts with the lowest scores are evicted.
Scores do not depend on the size of the cache, and those of several layers can be compared: slots
may belong to a layer or be shared by all. An engine that learns the routing of all layers at once
has one policy; one that decides layer by layer has a policy of one layer for each.

Shapes: T tokens, L layers, E experts of a layer, N needed experts of a layer; ids may repeat.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
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


CACHE_POLICIES: dict[str, Callable[[int, int], Policy]] = {"lfu": LFU, "lru": LRU}
"""Policies of the cache of a decoding step by their names in flags."""


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
