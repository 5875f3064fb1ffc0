"""Token rows go to the ranks that compute them, and results come back.

A rank's rows are sorted by (rank that computes them, expert, token). Received rows are ordered by
(source rank, expert, token). The stable sort by expert that follows makes that (expert, source
rank, token): the order of one process with the whole batch. If several ranks compute an expert,
each has a range of its rows in this order.

Shapes: T tokens, D model, E experts of all ranks, K top-k, R token rows of this rank's tokens,
N token rows that this rank computes, S ranks that have tokens, G ranks that compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overspill.compute.permute import (
    Permutation,
    combine,
    gather_rows,
    row_weights,
    sum_rows,
    to_device,
    weights_grad,
)
from overspill.core.expert_map import ExpertMap
from overspill.parallel.ranks import Ranks
from overspill.transfer.streams import to_host

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SentRows:
    """How the rows of one routing are divided among ranks. Kept from forward to backward."""

    permutation: Permutation
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    expert_ids_N1: Tensor
    """The global expert ids of received rows."""
    counts: dict[int, int]
    """Received rows of each expert, by its global id."""
    shared: dict[int, tuple[int, ...]]
    """The ranks that compute an expert, by its global id, unless its owner alone does."""
    versions: list[int]
    """Of the weights of each expert, as its owner has announced it."""


class RowExchange:
    """Each method is entered by all ranks, also by those without rows."""

    def __init__(
        self, ranks: Ranks, n_experts: int, device: torch.device, place: Callable[[Rows], Rows]
    ) -> None:
        """`place` plans, from the token rows of each expert, which rank computes how many of them,
        [G, E]; the same on all ranks. The rows of an expert go to ranks in their order."""
        self._ranks = ranks
        self._device = device
        self._n_experts = n_experts
        self._place = place
        parts = [ExpertMap.part(n_experts, rank, ranks.size) for rank in range(ranks.size)]
        self._owners_E = np.repeat(np.arange(ranks.size), [part.n_local for part in parts])

    def route(self, expert_ids_TK: Tensor, own_versions: Sequence[int] = ()) -> SentRows:
        """Tells all ranks how many rows they get; waits for the device. Rows without an expert are
        not sent. `own_versions` are those of the weights of this rank's experts."""
        permutation = Permutation.build(expert_ids_TK, self._n_experts)
        counts_SE, versions = self._exchange(to_host(permutation.counts_E), own_versions)
        rows_GE = self._place(counts_SE.sum(0))
        rows_SGE = _divide(counts_SE, rows_GE)
        sent_GE, received_SE = rows_SGE[self._ranks.rank], rows_SGE[:, self._ranks.rank]
        received = received_SE.sum(1).tolist()
        ids = np.tile(np.arange(self._n_experts), self._ranks.size)
        return SentRows(
            self._by_rank(permutation, sent_GE),
            sent_GE.sum(1).tolist(),
            received,
            self._repeat(ids, received_SE.reshape(-1)).view(-1, 1),
            dict(enumerate(received_SE.sum(0).tolist())),
            self._shared(rows_GE),
            versions,
        )

    def _exchange(self, counts_E: Tensor, own_versions: Sequence[int]) -> tuple[Rows, list[int]]:
        """The token rows from each rank, [S, E], and the versions of all experts."""
        numbers = torch.zeros(2, self._n_experts, dtype=torch.int64)
        numbers[0] = counts_E
        if own_versions:
            own = torch.from_numpy(self._owners_E == self._ranks.rank)
            numbers[1, own] = torch.tensor(own_versions)
        found = self._ranks.gather_numbers(numbers.view(-1)).view(-1, 2, self._n_experts)
        return found[:, 0].numpy(), found[:, 1].sum(0).tolist()

    def _by_rank(self, permutation: Permutation, sent_GE: Rows) -> Permutation:
        """Rows that are sorted by expert, sorted by (rank that computes them, expert)."""
        lengths_EG = sent_GE.T
        ranks_of_rows = np.tile(np.arange(self._ranks.size), self._n_experts)
        if (np.diff(ranks_of_rows[lengths_EG.reshape(-1) > 0]) >= 0).all():
            return permutation  # ranks compute experts in their order
        starts_EG = (lengths_EG.cumsum() - lengths_EG.reshape(-1)).reshape(lengths_EG.shape)
        lengths, starts = sent_GE.reshape(-1), starts_EG.T.reshape(-1)
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

    def send(self, rows: SentRows, x_TD: Tensor) -> Tensor:
        """The tokens of received rows, [N, D]."""
        x_RD = gather_rows(x_TD, rows.permutation, 0, sum(rows.sent))
        return self._ranks.all_to_all(x_RD, rows.sent, rows.received)

    def send_weights(self, rows: SentRows, weights_TK: Tensor) -> Tensor:
        """The routing weights of received rows, [N, 1]."""
        weights_R = row_weights(weights_TK, rows.permutation, 0, sum(rows.sent))
        return self._ranks.all_to_all(weights_R, rows.sent, rows.received).view(-1, 1)

    def combine(self, rows: SentRows, y_ND: Tensor, weights_TK: Tensor) -> Tensor:
        """Each token's weighted sum over the results of its rows, [T, D]."""
        return combine(self._back(rows, y_ND), weights_TK, rows.permutation)

    def combine_grads(
        self, rows: SentRows, dx_ND: Tensor, dweights_N1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the tokens [T, D] and of the routing weights [T, K]."""
        dx_TD = sum_rows(self._back(rows, dx_ND), rows.permutation)
        return dx_TD, weights_grad(self._back(rows, dweights_N1.view(-1)), rows.permutation)

    def _back(self, rows: SentRows, results_N: Tensor) -> Tensor:
        """Results of received rows return to their ranks; rows without an expert have zeros."""
        back = self._ranks.all_to_all(results_N, rows.received, rows.sent)
        without = rows.permutation.row_token_R.numel() - len(back)
        if without == 0:
            return back
        return torch.cat((back, back.new_zeros(without, *back.shape[1:])))


def _divide(counts_SE: Rows, rows_GE: Rows) -> Rows:
    """How many rows of each expert go from which rank to which, [S, G, E]: both the rows of ranks
    with tokens and of ranks that compute are ranges of an expert's rows; they overlap."""
    ends_SE, ends_GE = counts_SE.cumsum(0), rows_GE.cumsum(0)
    first = np.maximum((ends_SE - counts_SE)[:, None], (ends_GE - rows_GE)[None])
    last = np.minimum(ends_SE[:, None], ends_GE[None])
    rows_SGE: Rows = np.maximum(last - first, 0)
    return rows_SGE
