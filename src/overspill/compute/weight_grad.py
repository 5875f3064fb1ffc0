"""Gradients of the weights of a wave's experts that are computed when it is known where to: as
tensors, or added to sums over several waves without a tensor in between.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from overspill.compute import grouped


class WeightGrad(Protocol):
    """The gradient of one tensor of all experts, [n, ...]."""

    def value(self) -> Tensor:
        """In the data type of the weights."""

    def widened(self) -> Tensor:
        """In float32 or wider: the first one of a sum."""

    def add_to(self, total: Tensor) -> None:
        """Adds it to a sum that `widened` has begun."""


class Computed(NamedTuple):
    """One that is there."""

    grad: Tensor

    def value(self) -> Tensor:
        return self.grad

    def widened(self) -> Tensor:
        return self.grad.to(_wide(self.grad))

    def add_to(self, total: Tensor) -> None:
        total.add_(self.grad)


class Product(NamedTuple):
    """One that is a product over the token rows of each expert (`grouped.weight_grad`)."""

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
        return torch.mm(self.a_RM.t(), self.b_RN, out_dtype=torch.float32).unsqueeze(0)

    def add_to(self, total: Tensor) -> None:
        if not self._sums_itself:
            Computed(self.value()).add_to(total)
            return
        pair = self.a_RM.t(), self.b_RN
        torch.addmm(total[0], *pair, out_dtype=torch.float32, out=total[0])

    @property
    def _sums_itself(self) -> bool:
        """Whether the product of a single expert can write float32 sums of 16-bit rows."""
        return self.backend == "single" and self.a_RM.is_cuda and self.a_RM.itemsize == 2


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
