"""Token rows go to the ranks that hold their experts, and results come back.

A rank's rows are sorted by global expert id. Ranks hold consecutive ids, so the rows of each rank
are one piece. Received rows are ordered by (source rank, expert, token). The owner's stable sort by
expert makes that (expert, source rank, token): the order of one process with the whole batch.

Shapes: T tokens, D model, E experts of all ranks, K top-k, R token rows of this rank's tokens,
N token rows for this rank's experts.
"""

from dataclasses import dataclass

import torch
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


class RowExchange:
    """Each method is entered by all ranks, also by those without rows."""

    def __init__(self, ranks: Ranks, n_experts: int, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._n_experts = n_experts
        parts = [ExpertMap.part(n_experts, rank, ranks.size) for rank in range(ranks.size)]
        self._sizes = [part.n_local for part in parts]
        self._own = list(parts[ranks.rank].local_ids)

    def route(self, expert_ids_TK: Tensor) -> SentRows:
        """Tells all ranks how many rows they get; waits for the device. Rows without an expert are
        not sent."""
        permutation = Permutation.build(expert_ids_TK, self._n_experts)
        counts_E = to_host(permutation.counts_E)
        from_ranks = self._ranks.exchange_counts(counts_E, self._sizes)
        received = from_ranks.sum(1).tolist()
        ids = self._own * self._ranks.size
        packed = torch.tensor([ids, from_ranks.view(-1).tolist()], dtype=torch.int64)
        ids_N = to_device(packed, self._device)
        return SentRows(
            permutation,
            [int(part.sum()) for part in counts_E.split(self._sizes)],
            received,
            torch.repeat_interleave(ids_N[0], ids_N[1], output_size=sum(received)).view(-1, 1),
            dict(zip(self._own, from_ranks.sum(0).tolist(), strict=True)),
        )

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
