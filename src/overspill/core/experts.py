"""The words for experts: which one, of what shape, in which phase of a step."""

import enum
from dataclasses import dataclass
from typing import NamedTuple


class ExpertId(NamedTuple):
    """One expert: the MoE layer (counted over MoE layers only, from the input) and its index there.

    The natural order of the tuple, lowest layer first, is also the order in which the next
    forward will need the experts.
    """

    layer: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody misses


class Phase(enum.Enum):
    """Which way a layer is being passed."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class ExpertShape:
    """The matrices of one feed-forward expert.

    `gated`: w_in is [2H, D] (gate rows, then up rows) with SiLU; else [H, D] with GELU. w_out is
    [D, H]. A record holds w_in, then w_out, flat.
    """

    d_model: int
    d_hidden: int
    gated: bool

    @property
    def in_rows(self) -> int:
        return self.d_hidden * (2 if self.gated else 1)

    @property
    def in_numel(self) -> int:
        return self.in_rows * self.d_model

    @property
    def out_numel(self) -> int:
        return self.d_model * self.d_hidden

    @property
    def numel(self) -> int:
        return self.in_numel + self.out_numel
