"""Low-rank matrices (LoRA) beside those of a wave's experts: W + scale * B @ A is not formed.

Shapes: R token rows sorted by expert, n experts, r rank, I inputs and O outputs of a matrix. The
rows of an expert pass through its own A and B, in the same grouped kernels as the experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.compute import grouped
from overspill.tiers.layout import RecordLayout

_ALIGNMENT = 8  # bfloat16 elements that the grouped kernels load at once


class LowRankGrads(NamedTuple):
    """Gradients of both matrices, with the shapes of `LowRank`."""

    a_nrI: Tensor
    b_nOr: Tensor


class LowRank(NamedTuple):
    """The low-rank part of one matrix of each expert."""

    a_nrI: Tensor
    b_nOr: Tensor
    scale: float

    @classmethod
    def of(
        cls, a_ErI: Tensor, b_EOr: Tensor, scale: float, experts: Tensor | None, dtype: torch.dtype
    ) -> "LowRank":
        """Return copies in `dtype` for the given experts, or for all; the rank is filled up with
        zeros to the alignment of the kernels."""
        if experts is not None:
            a_ErI, b_EOr = a_ErI.index_select(0, experts), b_EOr.index_select(0, experts)
        number, rank, inputs = a_ErI.shape
        padded = -(-rank // _ALIGNMENT) * _ALIGNMENT
        a_nrI = a_ErI.new_zeros(number, padded, inputs, dtype=dtype)
        b_nOr = b_EOr.new_zeros(number, b_EOr.shape[1], padded, dtype=dtype)
        a_nrI[:, :rank], b_nOr[:, :, :rank] = a_ErI, b_EOr
        return cls(a_nrI, b_nOr, scale)

    def part(self, first: int, stop: int) -> "LowRank":
        return LowRank(self.a_nrI[first:stop], self.b_nOr[first:stop], self.scale)

    def add_product(
        self, out_RO: Tensor, x_RI: Tensor, backend: grouped.Backend, ends: Tensor
    ) -> None:
        """Compute out += scale * (x @ A^T) @ B^T."""
        x_Rr = grouped.product(backend, x_RI, self.a_nrI.transpose(1, 2), ends)
        _add_product(out_RO, x_Rr, self.b_nOr.transpose(1, 2), self.scale, backend, ends)

    def add_input_grad(
        self, dx_RI: Tensor, dy_RO: Tensor, backend: grouped.Backend, ends: Tensor
    ) -> None:
        """Compute dx += scale * (dy @ B) @ A."""
        dy_Rr = grouped.product(backend, dy_RO, self.b_nOr, ends)
        _add_product(dx_RI, dy_Rr, self.a_nrI, self.scale, backend, ends)

    def grads(
        self,
        x_RI: Tensor,
        dy_RO: Tensor,
        backend: grouped.Backend,
        ends: Tensor,
        counts: Sequence[int] | None = None,
    ) -> LowRankGrads:
        """Return the gradients of A and B, without the scale. The routing weight of a row is a
        factor of either `x_RI` or `dy_RO`."""
        x_Rr = grouped.product(backend, x_RI, self.a_nrI.transpose(1, 2), ends)
        dy_Rr = grouped.product(backend, dy_RO, self.b_nOr, ends)
        da_nrI = grouped.weight_grad(backend, dy_Rr, x_RI, ends, counts)
        db_nOr = grouped.weight_grad(backend, dy_RO, x_Rr, ends, counts)
        return LowRankGrads(da_nrI, db_nOr)


def _add_product(
    out_RN: Tensor,
    a_Rr: Tensor,
    w_nrN: Tensor,
    scale: float,
    backend: grouped.Backend,
    ends: Tensor,
) -> None:
    if backend == "single":  # rounds the sum once
        out_RN.addmm_(a_Rr, w_nrN[0], alpha=scale)
    else:
        out_RN.add_(grouped.product(backend, a_Rr, w_nrN, ends), alpha=scale)


class Adapters(NamedTuple):
    """Low-rank parts of both matrices; None for a matrix without one."""

    w_in: LowRank | None = None
    w_out: LowRank | None = None

    @classmethod
    def of_records(cls, layout: RecordLayout, records: Tensor) -> "Adapters":
        """Return the low-rank parts behind the weights in records [n, ...]."""
        if not any(layout.ranks):
            return NO_ADAPTERS
        flat = layout.computed(records)
        return cls(
            *(None if each is None else LowRank(*each.of(flat), 1.0) for each in layout.low_rank)
        )

    def part(self, first: int, stop: int) -> "Adapters":
        """Return the low-rank parts of the experts from `first` to `stop`."""
        return Adapters(*(None if each is None else each.part(first, stop) for each in self))


NO_ADAPTERS = Adapters()
