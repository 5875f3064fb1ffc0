"""Token rows go to the ranks that compute them, and results come back, in groups of experts.

A rank's rows are sorted by (group, rank that computes them, expert, token). Received rows are
ordered by (group, source rank, expert, token). The stable sort by expert that follows makes that
(expert, source rank, token): the order of one process with the whole batch. If several ranks
compute an expert, each has a range of its rows in this order.

All groups of a pass share one tensor of received rows and one of returned results, in which each
group has its range. With any number of groups the same rows lie in the same tensors, so results do
not depend on it.

Shapes: T tokens, D model, E experts of all ranks, K top-k, R token rows of this rank's tokens,
N token rows that this rank computes, S ranks that have tokens, G ranks that compute.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overspill.compute.permute import (
    Permutation,
    combine,
    counts_of,
    gather_rows,
    row_weights,
    sum_rows,
    to_device,
    weights_grad,
)
from overspill.core.expert_map import ExpertMap
from overspill.parallel.exchange.interface import Exchange
from overspill.transfer.streams import to_host
from overspill.transfer.work_stream import Arrival

Rows = NDArray[np.int64]
Divide = Callable[[Rows, Rows], Rows]
"""From the token rows that each rank computes of each expert, and the experts of each rank in the
order in which it computes them, [G, E] both, to the group of each expert on each rank, [G, E]."""


def one_group(rows_GE: Rows, order_GE: Rows) -> Rows:
    return np.zeros_like(rows_GE)


@dataclass(frozen=True, eq=False)
class RowGroup:
    """The rows of one group of experts."""

    experts: frozenset[int]
    """The global ids of the experts that this rank computes."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    own: slice
    """Their range among the rows of this rank's tokens."""
    computed: slice
    """Their range among received rows."""


@dataclass(frozen=True, eq=False)
class SentRows:
    """The rows of one routing, as they are divided among ranks. Kept from forward to backward."""

    permutation: Permutation
    groups: list[RowGroup]
    """The groups; all ranks have the same number."""
    expert_ids_N1: Tensor
    """The global expert ids of received rows."""
    counts: dict[int, int]
    """Received rows of each expert, by its global id."""
    shared: dict[int, tuple[int, ...]]
    """The ranks that compute an expert, by its global id, unless its owner alone does."""
    versions: list[int]
    """The version of each expert's weights that its owner has published."""
    most_rows: int
    """Rows that the rank with most of them computes."""

    def received_like(self, like: Tensor) -> Tensor:
        """A tensor for received rows."""
        return like.new_empty(self.groups[-1].computed.stop, *like.shape[1:])

    def returned_like(self, like: Tensor) -> Tensor:
        """A tensor for returned results; rows without an expert have zeros."""
        returned = like.new_empty(self.permutation.row_token_R.numel(), *like.shape[1:])
        returned[self.groups[-1].own.stop :] = 0
        return returned


class RowExchange:
    """Each method is entered by all ranks, also by those without rows."""

    def __init__(
        self,
        exchange: Exchange,
        n_experts: int,
        place: Callable[[Rows], Rows],
        divide: Divide = one_group,
    ) -> None:
        """`place` plans, from the token rows of each expert, which rank computes how many of them,
        [G, E]. The rows of an expert go to ranks in their order. `divide` plans the groups. Both
        are the same on all ranks."""
        self._exchange = exchange
        self._device = exchange.device
        self._n_experts = n_experts
        self._place = place
        self._divide = divide
        size = exchange.size
        parts = [ExpertMap.part(n_experts, rank, size) for rank in range(size)]
        self._owners_E = np.repeat(np.arange(size), [part.n_local for part in parts])

    def route(
        self,
        expert_ids_TK: Tensor,
        own_versions: Sequence[int] = (),
        own_positions: Sequence[int] = (),
    ) -> SentRows:
        """Tell all ranks the numbers of rows that they get. Waits for the device. Rows without an
        expert are not sent. `own_versions` are those of the weights of this rank's experts.
        `own_positions` say in which order it computes them; left out: in that of their ids."""
        permutation = Permutation.build(expert_ids_TK, self._n_experts)
        counts_E = counts_of(to_host(permutation.ends_E))
        counts_SE, versions, positions_E = self._tell(counts_E, own_versions, own_positions)
        rows_GE = self._place(counts_SE.sum(0))
        groups_GE = self._divide(rows_GE, self._order(positions_E))
        rows_SGE = _rows_between(counts_SE, rows_GE)
        rank = self._exchange.rank
        received_SE, groups_SE = rows_SGE[:, rank], np.tile(groups_GE[rank], (len(counts_SE), 1))
        cells = np.argsort(groups_SE.reshape(-1), kind="stable")  # by (group, source, expert)
        ids = cells % self._n_experts
        return SentRows(
            self._by_rank(permutation, rows_SGE[rank], groups_GE),
            self._groups(rows_SGE, groups_GE),
            self._repeat(ids, received_SE.reshape(-1)[cells]).view(-1, 1),
            dict(enumerate(received_SE.sum(0).tolist())),
            self._shared(rows_GE),
            versions,
            int(rows_GE.sum(1).max()),
        )

    def _order(self, positions_E: Rows) -> Rows:
        """The experts of each rank in the order in which it computes them, [G, E]: first its own,
        then those of other ranks."""
        ranks_G1 = np.arange(self._exchange.size)[:, None]
        keys_GE = np.where(self._owners_E == ranks_G1, positions_E, self._n_experts)
        return np.argsort(keys_GE, axis=1, kind="stable")

    def _groups(self, rows_SGE: Rows, groups_GE: Rows) -> list[RowGroup]:
        """The groups, without the last ones if these have no rows on any rank."""
        rank = self._exchange.rank
        last = int(groups_GE[rows_SGE.any(0)].max(initial=0))
        members = [groups_GE == number for number in range(last + 1)]
        sent = [(rows_SGE[rank] * of).sum(1).tolist() for of in members]
        received = [(rows_SGE[:, rank] * of[rank]).sum(1).tolist() for of in members]
        own = itertools.pairwise([0, *itertools.accumulate(map(sum, sent))])
        computed = itertools.pairwise([0, *itertools.accumulate(map(sum, received))])
        numbers = zip(members, sent, received, own, computed, strict=True)
        return [
            RowGroup(frozenset(np.flatnonzero(of[rank]).tolist()), to, source, slice(*a), slice(*b))
            for of, to, source, a, b in numbers
        ]

    def _tell(
        self, counts_E: Tensor, own_versions: Sequence[int], own_positions: Sequence[int]
    ) -> tuple[Rows, list[int], Rows]:
        """The token rows from each rank, [S, E], and the versions and positions of all experts."""
        numbers = torch.zeros(3, self._n_experts, dtype=torch.int64)
        numbers[0] = counts_E
        own = torch.from_numpy(self._owners_E == self._exchange.rank)
        for line, values in ((1, own_versions), (2, own_positions)):
            if values:
                numbers[line, own] = torch.tensor(values)
        found = self._exchange.gather_numbers(numbers.view(-1)).view(-1, 3, self._n_experts)
        return found[:, 0].numpy(), found[:, 1].sum(0).tolist(), found[:, 2].sum(0).numpy()

    def _by_rank(self, permutation: Permutation, sent_GE: Rows, groups_GE: Rows) -> Permutation:
        """Rows that are sorted by expert, sorted by (group, rank that computes them, expert)."""
        lengths_EG = sent_GE.T
        starts_EG = (lengths_EG.cumsum() - lengths_EG.reshape(-1)).reshape(lengths_EG.shape)
        cells = np.argsort(groups_GE.reshape(-1), kind="stable")
        lengths, starts = sent_GE.reshape(-1)[cells], starts_EG.T.reshape(-1)[cells]
        if (np.diff(starts[lengths > 0]) >= 0).all():
            return permutation  # ranks compute experts in their order
        shifts: Rows = starts - lengths.cumsum(dtype=np.int64) + lengths
        shift_R = self._repeat(shifts, lengths)
        return permutation.reordered(shift_R + torch.arange(len(shift_R), device=self._device))

    def _repeat(self, values: Rows, times: Rows) -> Tensor:
        """Each value so many times, on the device."""
        packed = to_device(torch.from_numpy(np.stack((values, times))), self._device)
        return torch.repeat_interleave(packed[0], packed[1], output_size=int(times.sum()))

    def _shared(self, rows_GE: Rows) -> dict[int, tuple[int, ...]]:
        """The ranks that compute each expert which its owner does not compute alone."""
        elsewhere_GE = rows_GE.copy()
        elsewhere_GE[self._owners_E, np.arange(self._n_experts)] = 0
        experts = np.flatnonzero(elsewhere_GE.any(0)).tolist()
        return {e: tuple(np.flatnonzero(rows_GE[:, e]).tolist()) for e in experts}

    def send(self, rows: SentRows, number: int, x_TD: Tensor, into_ND: Tensor) -> Arrival:
        """Begin to send the tokens of a group; they arrive in its range of `into_ND`."""
        group = rows.groups[number]
        x_RD = gather_rows(x_TD, rows.permutation, group.own.start, group.own.stop)
        return self._there(group, x_RD, into_ND, f"S{number}")

    def send_weights(
        self, rows: SentRows, number: int, weights_TK: Tensor, into_N1: Tensor
    ) -> Arrival:
        """Begin to send the routing weights of a group."""
        group = rows.groups[number]
        weights_R = row_weights(weights_TK, rows.permutation, group.own.start, group.own.stop)
        return self._there(group, weights_R.view(-1, 1), into_N1, f"S of weights {number}")

    def _there(self, group: RowGroup, sent: Tensor, into: Tensor, label: str) -> Arrival:
        return self._exchange.send(sent, group.sent, group.received, label, into[group.computed])

    def send_back(self, rows: SentRows, number: int, results: Tensor, into: Tensor) -> Arrival:
        """Begin to return the results of a group, in the order of received rows; they arrive in its
        range of `into`."""
        group = rows.groups[number]
        args = results, group.received, group.sent, f"R{number}"
        return self._exchange.send(*args, into[group.own])


def combine_results(rows: SentRows, y_RD: Tensor, weights_TK: Tensor) -> Tensor:
    """Each token's weighted sum over the returned results of its rows, [T, D]."""
    return combine(y_RD, weights_TK, rows.permutation)


def combine_grads(rows: SentRows, dx_RD: Tensor, dweights_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the tokens [T, D] and of the routing weights [T, K]."""
    dweights_TK = weights_grad(dweights_R1.view(-1), rows.permutation)
    return sum_rows(dx_RD, rows.permutation), dweights_TK


def _rows_between(counts_SE: Rows, rows_GE: Rows) -> Rows:
    """The number of rows of each expert from rank S to rank G, [S, G, E]: both the rows of ranks
    with tokens and of ranks that compute are ranges of an expert's rows; they overlap."""
    ends_SE, ends_GE = counts_SE.cumsum(0), rows_GE.cumsum(0)
    first = np.maximum((ends_SE - counts_SE)[:, None], (ends_GE - rows_GE)[None])
    last = np.minimum(ends_SE[:, None], ends_GE[None])
    rows_SGE: Rows = np.maximum(last - first, 0)
    return rows_SGE
