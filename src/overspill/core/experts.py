"""Basic types: the id and the shape of an expert, and the phase of a step."""

import enum
import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple


class ExpertId(NamedTuple):
    """Key of an expert: the MoE layer (counting MoE layers only) and the index in it.

    The order of the tuples, lowest layer first, is the order in which a forward needs the experts.
    """

    layer: int
    index: int  # type: ignore[assignment]  # shadows tuple.index


class Phase(enum.Enum):
    """The direction of a pass through a layer."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class ExpertShape:
    """Shapes of the tensors of one feed-forward expert.

    w_in is [2H, D] if `gated`, else [H, D]; w_out is [D, H]; both are transposed if `transposed`.
    With `bias` each has one. A record consists of w_in, w_out, b_in and b_out, flat.
    """

    d_model: int
    d_hidden: int
    gated: bool
    bias: bool = False
    transposed: bool = False

    @property
    def in_rows(self) -> int:
        return self.d_hidden * (2 if self.gated else 1)

    @property
    def in_numel(self) -> int:
        return self.in_rows * self.d_model

    @property
    def out_numel(self) -> int:
        return self.d_model * self.d_hidden

    @functools.cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors in a record."""
        w_in, w_out = (self.in_rows, self.d_model), (self.d_model, self.d_hidden)
        if self.transposed:
            w_in, w_out = w_in[::-1], w_out[::-1]
        return (w_in, w_out, (self.in_rows,), (self.d_model,)) if self.bias else (w_in, w_out)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The offsets of the tensors in a record."""
        return tuple(itertools.accumulate((math.prod(s) for s in self.sizes[:-1]), initial=0))

    @property
    def numel(self) -> int:
        biases = self.in_rows + self.d_model if self.bias else 0
        return self.in_numel + self.out_numel + biases
