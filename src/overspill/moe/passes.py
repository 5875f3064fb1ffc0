"""A passage of tokens through the experts of a layer, and the waves it is computed in."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from overspill.compute.activation import Activation
from overspill.compute.permute import Permutation


class Promise:
    """That a backward will come. Outlives its pass if the graph is thrown away."""


@dataclass(eq=False)
class LayerPass:
    """One passage of tokens through one layer, from its forward to its backward."""

    layer: int
    training: bool = False  # a backward will follow
    trained: bool = True  # its weights want gradients
    drops: bool = False  # ids beyond the last expert stand for none
    activation: Activation | None = None
    permutation: Permutation | None = None
    counts: list[int] = field(default_factory=list)
    kept: Tensor | None = None  # pre-activations, if they are kept
    promise: Promise = field(default_factory=Promise)

    def n_routed(self, n_rows: int) -> int:
        """Rows that have an expert; those without come last."""
        return sum(self.counts) if self.drops else n_rows


@dataclass(frozen=True)
class Wave:
    """Neighbouring experts [first, stop) of a layer that compute together on rows [start, end)."""

    first: int
    stop: int
    start: int
    end: int
    weights: Tensor
    ends: Tensor
    counts: list[int] | None


def sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """Of each expert's gradient, whose tensors are stacked in `parts`; float32, and the same bits
    however many experts are stacked."""
    squares = [
        torch.linalg.vector_norm(part.flatten(1), dim=1, dtype=torch.float32).square()
        for part in parts
    ]
    return torch.stack(squares).sum(0)
