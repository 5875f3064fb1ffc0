"""Tokens to rows and back: rows are sorted by expert, without a dispatch mask and without padding.

Shapes: T tokens, D model, E experts, K top-k, R = T*K rows.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Rows are summed in float32. Doing it for this many rows at a time keeps that scratch small (a
# hundred MiB at D = 1024) whatever the batch; no sum crosses tokens, so the cut changes nothing.
_ROWS_AT_ONCE = 16384


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
    """Rows of each expert, int32; none for those that were put apart."""
    ends_E: Tensor
    """Where each expert's rows end (the cumulative sum of the counts), int32."""

    @classmethod
    def build(cls, expert_ids_TK: Tensor, n_experts: int) -> "Permutation":
        """Sorts the assignments by expert, stably: within an expert, tokens stay in order.

        Never waits for the device. That is why the ends come from a binary search in the sorted
        ids: `bincount` would read its maximum back to the host.
        """
        # int32 keys halve the passes of the radix sort.
        flat_R = expert_ids_TK.reshape(-1).to(torch.int32)
        sorted_R, row_slot_R = torch.sort(flat_R, stable=True)
        experts_E = torch.arange(n_experts, device=flat_R.device, dtype=torch.int32)
        ends_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        return cls._of(row_slot_R, expert_ids_TK.shape[1], counts_E, ends_E)

    @classmethod
    def with_counts(
        cls, expert_ids_TK: Tensor, counts: Sequence[int], apart: Collection[int] = ()
    ) -> "Permutation":
        """The same where the host knows the counts already. The rows of the experts `apart` come
        after all others, and count as nobody's."""
        n_experts = len(counts)
        there = [0 if expert in apart else count for expert, count in enumerate(counts)]
        numbers = [*_ranks(n_experts, apart), *there, *itertools.accumulate(there)]
        packed = _sent(torch.tensor(numbers, dtype=torch.int32), expert_ids_TK.device)
        rank_E, counts_E, ends_E = packed.split([n_experts + 1, n_experts, n_experts])
        _, row_slot_R = torch.sort(rank_E[expert_ids_TK.reshape(-1)], stable=True)
        return cls._of(row_slot_R, expert_ids_TK.shape[1], counts_E, ends_E)

    @classmethod
    def on_host(
        cls,
        expert_ids_TK: Tensor,
        counts: Sequence[int],
        apart: Collection[int],
        device: torch.device,
    ) -> "Permutation":
        """The same for ids in host memory: sorted there and sent to the device as one piece, which
        for few rows takes a fraction of the launches."""
        n_experts, (n_tokens, top_k) = len(counts), expert_ids_TK.shape
        n_rows = n_tokens * top_k
        rank_E = np.array(_ranks(n_experts, apart), dtype=np.int16)
        there = np.array([0 if e in apart else n for e, n in enumerate(counts)], dtype=np.int32)
        packed = torch.empty(3 * n_rows + n_experts, dtype=torch.int64)
        slot, token, inverse, narrow = np.split(packed.numpy(), [n_rows, 2 * n_rows, 3 * n_rows])
        slot[:] = rank_E[expert_ids_TK.numpy().reshape(-1)].argsort(kind="stable")
        np.floor_divide(slot, top_k, out=token)
        inverse[slot] = np.arange(n_rows)
        narrow.view(np.int32)[:n_experts] = there
        narrow.view(np.int32)[n_experts:] = there.cumsum()
        sent = _sent(packed, device)
        slot_R, token_R, inverse_R, narrow_E = sent.split([n_rows, n_rows, n_rows, n_experts])
        counts_E, ends_E = narrow_E.view(torch.int32).split(n_experts)
        return cls(token_R, slot_R, inverse_R.view(-1, top_k), counts_E, ends_E)

    @classmethod
    def _of(cls, row_slot_R: Tensor, top_k: int, counts_E: Tensor, ends_E: Tensor) -> "Permutation":
        row = torch.arange(row_slot_R.numel(), device=row_slot_R.device)
        inverse_R = torch.empty_like(row_slot_R).scatter_(0, row_slot_R, row)
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


def _ranks(n_experts: int, apart: Collection[int]) -> list[int]:
    """The place of each expert among the rows; ids beyond the last expert, which stand for none,
    stay behind everybody."""
    ranks = [0] * n_experts
    order = sorted(range(n_experts), key=lambda expert: expert in apart)
    for place, expert in enumerate(order):
        ranks[expert] = place
    return [*ranks, n_experts]


def _sent(packed: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what it is doing."""
    if device.type != "cuda":
        return packed
    return packed.pin_memory().to(device, non_blocking=True)


def count_rows(expert_ids_TK: Tensor, n_experts: int) -> Tensor:
    """Rows of each expert, int64, without sorting them."""
    ids_R = expert_ids_TK.reshape(-1).to(torch.int64)
    counts = ids_R.new_zeros(n_experts + 1)  # the last is of those that have no expert
    return counts.scatter_add_(0, ids_R, torch.ones_like(ids_R))[:n_experts]


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

    By gathers and sums of a fixed order, never by atomic adds: the same bits every time. Sums are
    float32 (or wider) and rounded once.
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
    step = max(1, _ROWS_AT_ONCE // top_k)
    if n_tokens <= step:
        return _sum_chunk(y_RD, permutation.inverse_TK, weights_TK, wide)
    out_TD = y_RD.new_empty(n_tokens, y_RD.shape[1])
    for start in range(0, n_tokens, step):
        chunk = slice(start, start + step)
        weights = None if weights_TK is None else weights_TK[chunk]
        out_TD[chunk] = _sum_chunk(y_RD, permutation.inverse_TK[chunk], weights, wide)
    return out_TD


def _sum_chunk(
    y_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None, wide: torch.dtype
) -> Tensor:
    rows_TKD = y_RD[inverse_TK]
    if weights_TK is None:
        return rows_TKD.sum(1, dtype=wide).to(y_RD.dtype)
    # Promotion does the widening inside the product: no separate cast pass.
    return (rows_TKD * weights_TK.unsqueeze(-1)).sum(1).to(y_RD.dtype)
