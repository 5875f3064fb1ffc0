"""Gradients of the weights of a wave's experts, which are computed when they are used: as tensors,
or directly as a part of sums over several waves."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from overspill.compute import grouped

_MANY = 2048
"""Average number of token rows of an expert from which on each expert has a product of its own."""


class WeightGrad(Protocol):
    """Gradient of one tensor of all experts, [n, ...]."""

    def value(self) -> Tensor:
        """Return the gradient in the data type of the weights."""

    def widened(self) -> Tensor:
        """Return the gradient in float32 or wider, to begin a sum with."""

    def add_to(self, total: Tensor) -> None:
        """Add the gradient to a sum that `widened` has begun."""


class Computed(NamedTuple):
    """Gradient that is already computed."""

    grad: Tensor

    def value(self) -> Tensor:
        return self.grad

    def widened(self) -> Tensor:
        return self.grad.to(_wide(self.grad))

    def add_to(self, total: Tensor) -> None:
        total.add_(self.grad)


class Product(NamedTuple):
    """Gradient that is a product over the token rows of each expert (`grouped.weight_grad`)."""

    backend: grouped.Backend
    a_RM: Tensor
    b_RN: Tensor
    ends: Tensor
    counts: Sequence[int] | None

    def value(self) -> Tensor:
        return grouped.weight_grad(*self)

    def widened(self) -> Tensor:
        if not self._sums_itself:
            return Computed(self.value()).widened()
        shape = len(self._counts), self.a_RM.shape[1], self.b_RN.shape[1]
        total = self.a_RM.new_empty(shape, dtype=torch.float32)
        for out, a_MR, b_RN in self._experts(total):
            if len(b_RN):
                torch.mm(a_MR, b_RN, out_dtype=torch.float32, out=out)
            else:
                out.zero_()
        return total

    def add_to(self, total: Tensor) -> None:
        if not self._sums_itself:
            Computed(self.value()).add_to(total)
            return
        for out, a_MR, b_RN in self._experts(total):
            if len(b_RN):
                torch.addmm(out, a_MR, b_RN, out_dtype=torch.float32, out=out)

    def _experts(self, total: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each expert its part of the sum, and the factors of the product."""
        a_MR, counts = self.a_RM.t(), self._counts
        if len(counts) == 1:
            yield total[0], a_MR, self.b_RN
            return
        yield from zip(total, a_MR.split(counts, 1), self.b_RN.split(counts), strict=True)

    @property
    def _counts(self) -> list[int]:
        return [len(self.a_RM)] if self.counts is None else [*self.counts]

    @property
    def _sums_itself(self) -> bool:
        """Whether each expert has a product, which writes float32 sums of 16-bit rows. A grouped
        product cannot add to a sum; these take more launches, so rows must be many."""
        if not self.a_RM.is_cuda or self.a_RM.itemsize != 2:
            return False
        many = self.counts is not None and len(self.a_RM) >= _MANY * len(self.counts)
        return self.backend == "single" or (self.backend == "torch" and many)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
