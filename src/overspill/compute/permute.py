"""Sorts tokens into token rows by expert and back, without a dispatch mask or padding.

Shapes: T tokens, D model, E experts, K top-k, R = T*K token rows. An assignment is one of the T*K
pairs of a token and an expert; its index is t*K + k.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from overspill.hardware.native import has_triton

# Token rows are summed in float32, this many at a time, to bound the temporary memory (100 MiB at
# D = 1024). Sums do not cross tokens, so the division does not change results.
_ROWS_AT_ONCE = 16384
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KERNEL_TOP_K = 32
"""Largest K that the kernel sums; its code grows with K."""


@dataclass(frozen=True)
class RowOrder:
    """Order of the T*K assignments of one routing as token rows, on the routing's device."""

    row_token_R: Tensor
    """Token of each row, int64."""
    row_assignment_R: Tensor
    """Assignment of each row, int64."""
    inverse_TK: Tensor
    """Row of each assignment, int64."""

    @classmethod
    def sort(cls, keys_TK: Tensor) -> "RowOrder":
        """Sort the assignments by keys; with equal keys, tokens stay in order. Never waits for the
        device."""
        # int32 keys halve the passes of the radix sort
        _, row_assignment_R = torch.sort(keys_TK.reshape(-1).to(torch.int32), stable=True)
        return cls(*_order_of(row_assignment_R, keys_TK.shape[1]))


def _order_of(row_assignment_R: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of `RowOrder`."""
    row = torch.arange(row_assignment_R.numel(), device=row_assignment_R.device)
    inverse_R = torch.empty_like(row_assignment_R).scatter_(0, row_assignment_R, row)
    row_token_R = row_assignment_R if top_k == 1 else row_assignment_R // top_k
    return row_token_R, row_assignment_R, inverse_R.view(-1, top_k)


@dataclass(frozen=True)
class Permutation(RowOrder):
    """Token rows sorted by expert, and where the rows of each expert end."""

    ends_E: Tensor
    """End of each expert's rows, int32; experts that come `last` have no rows in it. The
    differences are the numbers of rows of the experts (`counts_of`)."""

    @classmethod
    def build(cls, expert_ids_TK: Tensor, n_experts: int) -> "Permutation":
        """Sort the assignments by expert; within an expert, tokens stay in order.

        Never waits for the device: the ends come from a binary search in the sorted ids, because
        `bincount` would copy its maximum to the host.
        """
        # int32 keys halve the passes of the radix sort
        flat_R = expert_ids_TK.reshape(-1).to(torch.int32)
        sorted_R, row_assignment_R = torch.sort(flat_R, stable=True)
        experts_E = torch.arange(n_experts, device=flat_R.device, dtype=torch.int32)
        ends_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
        return cls(*_order_of(row_assignment_R, expert_ids_TK.shape[1]), ends_E)

    @classmethod
    def with_counts(
        cls, expert_ids_TK: Tensor, counts: Sequence[int], last: Collection[int] = ()
    ) -> "Permutation":
        """Build the permutation if the host already knows the counts. The rows of the experts in
        `last` come after all others and are not counted."""
        n_experts = len(counts)
        kept = [0 if expert in last else count for expert, count in enumerate(counts)]
        numbers = [*_ranks(n_experts, last), *itertools.accumulate(kept)]
        packed = to_device(torch.tensor(numbers, dtype=torch.int32), expert_ids_TK.device)
        rank_E, ends_E = packed.split([n_experts + 1, n_experts])
        _, row_assignment_R = torch.sort(rank_E[expert_ids_TK.reshape(-1)], stable=True)
        return cls(*_order_of(row_assignment_R, expert_ids_TK.shape[1]), ends_E)

    @classmethod
    def on_host(
        cls,
        expert_ids_TK: Tensor,
        counts: Sequence[int],
        last: Collection[int],
        device: torch.device,
    ) -> "Permutation":
        """Build the permutation for ids in host memory. They are sorted there and copied to the
        device in one piece, which needs far fewer launches for few rows."""
        n_experts, (n_tokens, top_k) = len(counts), expert_ids_TK.shape
        n_rows = n_tokens * top_k
        rank_E = np.array(_ranks(n_experts, last), dtype=np.int16)
        kept = np.array([0 if e in last else n for e, n in enumerate(counts)], dtype=np.int32)
        packed = torch.empty(3 * n_rows + (n_experts + 1) // 2, dtype=torch.int64)
        starts = [n_rows, 2 * n_rows, 3 * n_rows]
        assignment, token, inverse, narrow = np.split(packed.numpy(), starts)
        assignment[:] = rank_E[expert_ids_TK.numpy().reshape(-1)].argsort(kind="stable")
        np.floor_divide(assignment, top_k, out=token)
        inverse[assignment] = np.arange(n_rows)
        narrow.view(np.int32)[:n_experts] = kept.cumsum()
        parts = to_device(packed, device).split([n_rows, n_rows, n_rows, len(narrow)])
        assignment_R, token_R, inverse_R, narrow_E = parts
        ends_E = narrow_E.view(torch.int32)[:n_experts]
        return cls(token_R, assignment_R, inverse_R.view(-1, top_k), ends_E)

    def reordered(self, order_R: Tensor) -> "Permutation":
        """Return the rows in another order: row `order_R[0]` first, and so on; rows that are not in
        it stay. The rows are not sorted by expert any more, and the ends do not change."""
        n_rows, rest = self.row_token_R.numel(), len(order_R)
        rows = torch.arange(n_rows, device=order_R.device)
        order_R = torch.cat((order_R, rows[rest:]))
        place_R = torch.empty_like(order_R).scatter_(0, order_R, rows)
        return Permutation(
            self.row_token_R[order_R],
            self.row_assignment_R[order_R],
            place_R[self.inverse_TK],
            self.ends_E,
        )

    def of_tokens(self, tokens: slice) -> "Permutation":
        """Return the same rows with the inverse of some tokens only, so that only these are
        combined."""
        return replace(self, inverse_TK=self.inverse_TK[tokens])


def _ranks(n_experts: int, last: Collection[int]) -> list[int]:
    """Return the rank of each expert in the order of rows. The id `n_experts` means no expert and
    comes after all others."""
    ranks = [0] * n_experts
    order = sorted(range(n_experts), key=lambda expert: expert in last)
    for rank, expert in enumerate(order):
        ranks[expert] = rank
    return [*ranks, n_experts]


def to_device(packed: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for its queued work."""
    if device.type != "cuda":
        return packed
    return packed.pin_memory().to(device, non_blocking=True)


def counts_of(ends_E: Tensor) -> Tensor:
    """Return the number of rows of each expert from their ends, on the same device."""
    return torch.diff(ends_E, prepend=ends_E.new_zeros(1))


def count_rows(expert_ids_TK: Tensor, n_experts: int) -> Tensor:
    """Return the number of rows of each expert, int64, without sorting."""
    ids_R = expert_ids_TK.reshape(-1).to(torch.int64)
    counts = ids_R.new_zeros(n_experts + 1)  # the last counts assignments without an expert
    return counts.scatter_add_(0, ids_R, torch.ones_like(ids_R))[:n_experts]


def gather_rows(x_TD: Tensor, order: RowOrder, start: int = 0, stop: int | None = None) -> Tensor:
    """Return copies of the tokens of the rows [start, stop)."""
    return x_TD.index_select(0, order.row_token_R[start:stop])


def row_weights(
    weights_TK: Tensor, order: RowOrder, start: int = 0, stop: int | None = None
) -> Tensor:
    """Return the routing weight of each row in [start, stop)."""
    return weights_TK.reshape(-1).index_select(0, order.row_assignment_R[start:stop])


def weights_grad(drow_weight_R: Tensor, order: RowOrder) -> Tensor:
    """Return the gradients of the [T, K] weights: the backward of `row_weights`."""
    return drow_weight_R[order.inverse_TK]


def combine(
    y_RD: Tensor,
    weights_TK: Tensor,
    order: RowOrder,
    rows_at_once: int = _ROWS_AT_ONCE,
    out: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Return each token's weighted sum over its K rows, [T, D] in the dtype of `y_RD`, or in `out`.
    `y_RD` begins with the row `first`.

    Deterministic: gathers and sums in a fixed order, no atomic adds. Sums are float32 (or wider)
    and rounded once.
    """
    return _sum_over_k(y_RD, order, weights_TK, rows_at_once, out, first)


def sum_rows(dx_RD: Tensor, order: RowOrder, out: Tensor | None = None, first: int = 0) -> Tensor:
    """Return each token's sum over its K rows, deterministic: the backward of `gather_rows`.
    `dx_RD` begins with the row `first`."""
    if order.inverse_TK.shape[1] == 1 and first == 0:
        return torch.index_select(dx_RD, 0, order.inverse_TK[:, 0], out=out)
    return _sum_over_k(dx_RD, order, None, _ROWS_AT_ONCE, out, first)


def _sum_over_k(
    y_RD: Tensor,
    order: RowOrder,
    weights_TK: Tensor | None,
    rows_at_once: int,
    out: Tensor | None,
    first: int,
) -> Tensor:
    n_tokens, top_k = order.inverse_TK.shape
    out_TD = y_RD.new_empty(n_tokens, y_RD.shape[1]) if out is None else out
    tensors = y_RD, order.inverse_TK, weights_TK, out_TD
    if _has_kernel(*tensors):
        from overspill.compute.permute_triton import sum_over_k

        sum_over_k(*tensors, first)
        return out_TD
    inverse_TK = order.inverse_TK - first if first else order.inverse_TK
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    step = max(1, rows_at_once // top_k)
    if n_tokens <= step:  # without views
        _sum_chunk(y_RD, inverse_TK, weights_TK, wide, out_TD)
        return out_TD
    for start in range(0, n_tokens, step):
        chunk = slice(start, start + step)
        weights = None if weights_TK is None else weights_TK[chunk]
        _sum_chunk(y_RD, inverse_TK[chunk], weights, wide, out_TD[chunk])
    return out_TD


def _has_kernel(
    y_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None, out_TD: Tensor
) -> bool:
    """Whether the kernel can compute the sum: it sums in float32 and takes contiguous tensors."""
    given = [t for t in (y_RD, inverse_TK, weights_TK, out_TD) if t is not None]
    return (
        y_RD.is_cuda
        and y_RD.dtype in _KERNEL_DTYPES
        and inverse_TK.dtype is torch.int64
        and (weights_TK is None or weights_TK.dtype is torch.float32)
        and inverse_TK.shape[1] <= _KERNEL_TOP_K
        and out_TD.numel() > 0
        and all(tensor.is_contiguous() for tensor in given)
        and has_triton("sums of token rows")
    )


def _sum_chunk(
    y_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None, wide: torch.dtype, out_TD: Tensor
) -> None:
    """Sum the rows of some tokens. Type promotion widens and rounds inside the products, without
    separate casts."""
    if weights_TK is None:
        out_TD.copy_(y_RD[inverse_TK].sum(1, dtype=wide))
    elif inverse_TK.shape[1] == 1:
        torch.mul(y_RD.index_select(0, inverse_TK[:, 0]), weights_TK, out=out_TD)
    else:
        out_TD.copy_((y_RD[inverse_TK] * weights_TK.unsqueeze(-1)).sum(1))
