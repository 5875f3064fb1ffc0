"""Tokens to rows and back: rows are sorted by expert, without a dispatch mask and without padding.

Shapes: T tokens, D model, E experts, K top-k, R = T*K rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows are summed in float32. Doing it for this many tokens at a time keeps that scratch small (a
# few dozen MiB at D = 1024) whatever the batch; no sum crosses tokens, so the cut changes nothing.
_TOKENS_AT_ONCE = 16384


@dataclass(frozen=True)
class Permutation:
    """How the T*K assignments of one routing lie as rows, all on the routing's device."""

    row_token_R: Tensor
    """The token each row is a copy of, int64."""
    row_slot_R: Tensor
    """The flat assignment t*K + k of each row: which routing weight belongs to it, int64."""
    inverse_TK: Tensor
    """The row of each assignment, int64."""
    counts_E: Tensor
    """Rows of each expert, int32."""
    ends_E: Tensor
    """Where each expert's rows end (the cumulative sum of the counts), int32."""

    @classmethod
    def build(cls, expert_ids_TK: Tensor, n_experts: int) -> "Permutation":
        """Sorts the assignments by expert, stably: within an expert, tokens stay in order.

        Never waits for the device. That is why the ends come from a binary search in the sorted
        ids: `bincount` would read its maximum back to the host.
        """
        top_k = expert_ids_TK.shape[1]
        # int32 keys halve the passes of the radix sort.
        flat_R = expert_ids_TK.reshape(-1).to(torch.int32)
        sorted_R, row_slot_R = torch.sort(flat_R, stable=True)
        row = torch.arange(row_slot_R.numel(), device=row_slot_R.device)
        inverse_R = torch.empty_like(row_slot_R).scatter_(0, row_slot_R, row)
        experts_E = torch.arange(n_experts, device=flat_R.device, dtype=torch.int32)
        ends_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        return cls(
            row_token_R=row_slot_R // top_k,
            row_slot_R=row_slot_R,
            inverse_TK=inverse_R.view(-1, top_k),
            counts_E=counts_E,
            ends_E=ends_E,
        )

    @property
    def n_rows(self) -> int:
        return self.row_slot_R.numel()


def gather_rows(
    x_TD: Tensor, permutation: Permutation, start: int = 0, stop: int | None = None
) -> Tensor:
    """The rows [start, stop): a copy of each row's token."""
    return x_TD.index_select(0, permutation.row_token_R[start:stop])


def row_weights(
    weights_TK: Tensor, permutation: Permutation, start: int = 0, stop: int | None = None
) -> Tensor:
    """The routing weight of each row in [start, stop)."""
    return weights_TK.reshape(-1).index_select(0, permutation.row_slot_R[start:stop])


def weights_grad(drow_weight_R: Tensor, permutation: Permutation) -> Tensor:
    """The way back of `row_weights`: gradients of rows as gradients of the [T, K] weights."""
    return drow_weight_R[permutation.inverse_TK]


def combine(y_RD: Tensor, weights_TK: Tensor, permutation: Permutation) -> Tensor:
    """Each token's weighted sum over its K rows, [T, D] in the dtype of `y_RD`.

    By gathers in the order of k, never by atomic adds: the same bits every time. Sums are float32
    (or wider) and rounded once.
    """
    return _sum_over_slots(y_RD, permutation, weights_TK)


def sum_rows(dx_RD: Tensor, permutation: Permutation) -> Tensor:
    """Each token's plain sum over its K rows, the way back of `gather_rows`; as deterministic."""
    if permutation.inverse_TK.shape[1] == 1:
        return dx_RD.index_select(0, permutation.inverse_TK[:, 0])
    return _sum_over_slots(dx_RD, permutation, None)


def _sum_over_slots(y_RD: Tensor, permutation: Permutation, weights_TK: Tensor | None) -> Tensor:
    n_tokens, top_k = permutation.inverse_TK.shape
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    out_TD = y_RD.new_empty(n_tokens, y_RD.shape[1])
    for start in range(0, n_tokens, _TOKENS_AT_ONCE):
        chunk = slice(start, start + _TOKENS_AT_ONCE)
        total: Tensor | None = None
        for k in range(top_k):
            rows = y_RD.index_select(0, permutation.inverse_TK[chunk, k])
            # Promotion does the widening inside the product: no separate cast pass.
            term = rows.to(wide) if weights_TK is None else rows * weights_TK[chunk, k, None]
            total = term.to(wide) if total is None else total.add_(term)
        assert total is not None
        out_TD[chunk] = total
    return out_TD
