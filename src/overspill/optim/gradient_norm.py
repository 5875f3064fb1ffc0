"""The global gradient norm."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from overspill.core.experts import ExpertId, ExpertShape


def gradient_norm(dense: Sequence[Tensor], expert_squares: float) -> float:
    """The 2-norm over dense gradients and experts, given the experts' sum of squares. Sums of
    squares are float64, so that several processes can add theirs before the root."""
    return math.sqrt(expert_squares + sum_of_squares(dense))


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    if not tensors:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))
    return float(norms.double().square().sum().item())


def total_of_squares(squares: Mapping[ExpertId, float]) -> float:
    """The sum over experts, in the order of their ids: the same bits wherever each one is."""
    in_order = [squares[expert] for expert in sorted(squares)]
    return float(torch.tensor(in_order, dtype=torch.float64).sum())


def tensors_of(records: Tensor, shape: ExpertShape) -> tuple[Tensor, ...]:
    """Return each tensor of flat records [n, numel], as [n, length]."""
    return torch.split(records, [math.prod(size) for size in shape.sizes], dim=1)


def expert_squares(parts: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each expert's gradient, whose tensors are stacked in `parts`; float32,
    and the same bits however many experts are stacked."""
    squares = [
        torch.linalg.vector_norm(part.flatten(1), dim=1, dtype=torch.float32).square()
        for part in parts
    ]
    return torch.stack(squares).sum(0)
