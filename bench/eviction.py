"""Caches of experts on a recorded routing: policies, hit rates, and the optimum.

Shapes: T tokens, L layers, E experts of a layer, N needed experts of a layer; ids may repeat.
"""

from collections.abc import Sequence

import numpy as np

from overspill.plan.eviction import Floats, Ids, Mask, Policy


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
    """Contents of a cache of `room` experts a layer after `needed_LE` were used: of these and of
    the cached experts, those with the highest scores.

    Needed experts come first. With `optional`, where they can be used without a GPU slot, they too
    need a higher score than others. Slots that all layers share are those of a single layer: give
    arrays of one row.
    """
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
