"""A passage of tokens through the experts of a layer, and the waves it is computed in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
    simulated: bool = False  # the routing does not come from the tokens: nobody can predict it
    activation: Activation | None = None
    permutation: Permutation | None = None
    counts: list[int] = field(default_factory=list)
    expert_ids_TK: Tensor | None = None  # to sort the rows again; in host memory if they are few
    on_host: frozenset[int] = frozenset()  # experts that the CPU computes: their rows come last
    kept: Tensor | None = None  # pre-activations, if they are kept
    promise: Promise = field(default_factory=Promise)

    @property
    def device_counts(self) -> list[int]:
        """Rows of each expert that computes on the device."""
        if not self.on_host:
            return self.counts
        return [0 if index in self.on_host else n for index, n in enumerate(self.counts)]

    @property
    def host_rows(self) -> slice:
        """The rows of the others."""
        total = sum(self.counts)
        return slice(total - sum(self.counts[index] for index in self.on_host), total)

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


class HostWork(Protocol):
    """Experts of a pass that the CPU is computing."""

    def take(self, out_RD: Tensor, dweights_R: Tensor | None = None) -> None:
        """Waits for them and puts the results into their rows: y, or in backward dx and the
        gradients of the routing weights."""


def sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """Of each expert's gradient, whose tensors are stacked in `parts`; float32, and the same bits
    however many experts are stacked."""
    squares = [
        torch.linalg.vector_norm(part.flatten(1), dim=1, dtype=torch.float32).square()
        for part in parts
    ]
    return torch.stack(squares).sum(0)
