"""The token rows of each partition: where they go, and in which order they lie.

The tokens of a rank are divided into n consecutive partitions (`Division`). Its rows are sorted by
(partition, expert, token), and ranks hold consecutive experts, so the rows of a partition are
sorted by rank. Received rows are ordered by (source rank, expert, token); `to_experts` makes that
(expert, source rank, token).

Shapes: T tokens, K top-k, E experts of all ranks, L experts of this rank, P partitions, G ranks,
R rows of this rank's tokens, N rows that this rank computes.
"""

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overspill.compute.permute import RowOrder, gather_rows, row_weights, to_device, weights_grad
from overspill.core.expert_map import ExpertMap
from overspill.parallel.exchange.interface import Exchange
from overspill.transfer.work_stream import Arrival

Rows = NDArray[np.int64]


class Division(NamedTuple):
    """The division of the tokens of a batch."""

    n: int
    """Partitions."""
    even: bool = True
    """All have the same size, which needs the least memory where they share it. Else the first and
    the last one have half the size of the others: nothing is computed before the first S, and the
    last R begins when all is computed."""

    @property
    def _units(self) -> int:
        """The number of units: the first and the last partition have one, the others two."""
        return max(1, 2 * self.n - 2)

    def bounds(self, n_tokens: int) -> list[int]:
        """The first token of each partition, and the end."""
        if self.even:
            return [n_tokens * p // self.n for p in range(self.n + 1)]
        inner = [n_tokens * (2 * p - 1) // self._units for p in range(1, self.n)]
        return [0, *inner, n_tokens]

    def keys(self, expert_ids_TK: Tensor, n_experts: int) -> Tensor:
        """partition * E + expert of each assignment."""
        if self.n == 1:
            return expert_ids_TK
        n_tokens = max(1, len(expert_ids_TK))
        # of token t the largest p with T*p//n <= t, which is T*p <= n*t + n - 1; or the largest p
        # with T*(2p-1)//units <= t
        pace, shift, size = self.n, 0, n_tokens
        if not self.even:
            pace, shift, size = self._units, n_tokens, 2 * n_tokens
        first, stop = pace - 1 + shift, pace - 1 + shift + pace * len(expert_ids_TK)
        partition_T = torch.arange(first, stop, pace, device=expert_ids_TK.device)
        partition_T.floor_divide_(size)
        return torch.add(expert_ids_TK, partition_T.unsqueeze(1), alpha=n_experts)


def key_counts(keys_TK: Tensor, n_keys: int) -> Tensor:
    """Rows of each key, on the device. Never waits for it, as `bincount` would."""
    keys_R = keys_TK.view(-1)
    return keys_R.new_zeros(n_keys).scatter_add_(0, keys_R, torch.ones_like(keys_R))


@dataclass(frozen=True, eq=False)
class SortedRows:
    """The rows of this rank by (partition, expert, token). Made without waiting for the device."""

    order: RowOrder
    parts: list[tuple[slice, slice, RowOrder]]
    """The tokens, the rows and the order of each partition. `inverse_TK` has the tokens of the
    partition alone, the other fields of the order are those of all partitions."""

    @classmethod
    def sort(cls, keys_TK: Tensor, division: Division) -> "SortedRows":
        whole = RowOrder.sort(keys_TK)
        n_tokens, top_k = keys_TK.shape
        parts = []
        for first, stop in itertools.pairwise(division.bounds(n_tokens)):
            tokens, rows = slice(first, stop), slice(first * top_k, stop * top_k)
            order = (
                whole if division.n == 1 else replace(whole, inverse_TK=whole.inverse_TK[tokens])
            )
            parts.append((tokens, rows, order))
        return cls(whole, parts)


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of one partition on this rank."""

    tokens: slice
    rows: slice
    order: RowOrder
    """The order of its rows, as in `SortedRows`."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    counts: list[int]
    """Received rows of each local expert."""
    ends: Tensor
    """The cumulative sum of `counts`, on the device."""
    to_experts: Tensor | None
    """The received row at each place in the order of experts; None: they are in this order."""
    to_ranks: Tensor | None
    """The inverse of `to_experts`."""

    @property
    def n_computed(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, eq=False)
class DividedRows:
    """All partitions of one pass. Kept from forward to backward."""

    order: RowOrder
    partitions: list[Partition]
    exchange: Exchange
    _sent_PG: Rows = field(repr=False)
    _received_PG: Rows = field(repr=False)

    def send(self, x_TD: Tensor, number: int, label: str) -> Arrival:
        """Begin to send the tokens of a partition to the ranks that compute them."""
        part = self.partitions[number]
        rows = gather_rows(x_TD, self.order, part.rows.start, part.rows.stop)
        return self.exchange.send(rows, part.sent, part.received, label)

    def send_back(self, rows_ND: Tensor, number: int, label: str) -> Arrival:
        """Begin to return the results of a partition, which are in the order of experts."""
        part = self.partitions[number]
        rows_ND = take_rows(rows_ND, part.to_ranks)
        return self.exchange.send(rows_ND, part.received, part.sent, label)

    def send_weights(self, weights_TK: Tensor) -> list[Tensor]:
        """The routing weights of the rows that this rank computes, for each partition."""
        weights_R = row_weights(weights_TK, self.order)
        if self.exchange.size > 1:
            weights_R = self._across(weights_R, self._sent_PG, self._received_PG)
        parts = weights_R.split([part.n_computed for part in self.partitions])
        return [
            take_rows(weights, part.to_experts)
            for weights, part in zip(parts, self.partitions, strict=True)
        ]

    def return_weight_grads(self, grads: list[Tensor]) -> Tensor:
        """The gradients of the routing weights [T, K] from those of computed rows."""
        parts = zip(grads, self.partitions, strict=True)
        by_partition = [take_rows(grad, part.to_ranks) for grad, part in parts]
        grads_N = torch.cat(by_partition) if len(by_partition) > 1 else by_partition[0]
        if self.exchange.size > 1:
            grads_N = self._across(grads_N, self._received_PG, self._sent_PG)
        return weights_grad(grads_N, self.order)

    def _across(self, values: Tensor, sent_PG: Rows, received_PG: Rows) -> Tensor:
        """Values of the rows of all partitions, in one exchange."""
        by_rank = values[to_device(_transposed(sent_PG), values.device)]
        sent, received = sent_PG.sum(0).tolist(), received_PG.sum(0).tolist()
        found = self.exchange.send(by_rank, sent, received, "routing weights").wait()
        return found[to_device(_transposed(received_PG.T), values.device)]


def take_rows(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _transposed(lengths_AB: Rows) -> Tensor:
    """Rows lie in blocks of these lengths, by (a, b). The row at each place if they are to lie by
    (b, a)."""
    lengths = lengths_AB.reshape(-1)
    starts_AB = (lengths.cumsum() - lengths).reshape(lengths_AB.shape)
    after, starts = lengths_AB.T.reshape(-1), starts_AB.T.reshape(-1)
    shifts = starts - (after.cumsum() - after)
    return torch.from_numpy(np.repeat(shifts, after) + np.arange(after.sum()))


def divide_rows(
    own: SortedRows, counts_GPE: Rows, experts: ExpertMap, exchange: Exchange
) -> DividedRows:
    """The partitions of a pass; `counts_GPE` counts the rows of all ranks."""
    n_experts, device = counts_GPE.shape[2], own.order.inverse_TK.device
    sent_PG = np.add.reduceat(
        counts_GPE[exchange.rank], _first_experts(n_experts, exchange.size), axis=1
    )
    first, stop = experts.local_ids[0], experts.local_ids[-1] + 1
    computed_GPL = counts_GPE[:, :, first:stop]
    received_PG, computed_PL = computed_GPL.sum(2).T, computed_GPL.sum(0)
    # each row is contiguous: kernels get its address alone, and numpy keeps orders of axes
    ends_PL = np.ascontiguousarray(computed_PL.cumsum(1), dtype=np.int32)
    ends = to_device(torch.from_numpy(ends_PL), device).unbind()
    # all at once: the device waits for the host here
    sent, received, counts = sent_PG.tolist(), received_PG.tolist(), computed_PL.tolist()
    partitions = []
    for p, (tokens, rows, order) in enumerate(own.parts):
        there = back = None
        if exchange.size > 1 and np.count_nonzero(received_PG[p]) > 1:
            there = to_device(_transposed(computed_GPL[:, p]), device)
            back = to_device(_transposed(computed_GPL[:, p].T), device)
        partitions.append(
            Partition(tokens, rows, order, sent[p], received[p], counts[p], ends[p], there, back)
        )
    return DividedRows(own.order, partitions, exchange, sent_PG, received_PG)


@functools.cache
def _first_experts(n_experts: int, n_ranks: int) -> list[int]:
    """The first expert of each rank."""
    return [ExpertMap.part(n_experts, rank, n_ranks).local_ids[0] for rank in range(n_ranks)]
