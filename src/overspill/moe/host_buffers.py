"""The memory through which tokens go to the CPU's experts and come back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.core.sizes import round_up
from overspill.tiers.layout import ALIGN

_MOST_BYTES = 64 << 20
_MOST_ROWS = 4096
"""Tokens of one pass that the CPU takes at most: with more it would be no help."""
_LINE = 64
"""Bytes of a cache line: each of the two flags has one of its own."""


def room_for_rows(d_model: int, dtype: torch.dtype) -> int:
    """How many rows the buffers hold."""
    return max(1, min(_MOST_ROWS, _MOST_BYTES // (3 * d_model * dtype.itemsize)))


@dataclass(frozen=True)
class HostBuffers:
    """The rows of a pass and the two flags, as one side sees them."""

    x: Tensor
    dy: Tensor
    out: Tensor
    weights: Tensor
    dweights: Tensor
    there: Tensor
    done: Tensor

    @staticmethod
    def size(rows: int, d_model: int, dtype: torch.dtype) -> int:
        """Bytes for all of them."""
        return round_up(rows * (3 * d_model * dtype.itemsize + 2 * 4) + 2 * _LINE, ALIGN)

    @classmethod
    def cut(cls, flat: Tensor, rows: int, d_model: int, dtype: torch.dtype) -> "HostBuffers":
        wide, narrow = rows * d_model * dtype.itemsize, rows * 4
        sizes = [_LINE, _LINE, wide, wide, wide, narrow, narrow]
        there, done, *parts = flat[: sum(sizes)].split(sizes)
        x, dy, out = (part.view(dtype).view(rows, d_model) for part in parts[:3])
        weights, dweights = (part.view(torch.float32) for part in parts[3:])
        return cls(x, dy, out, weights, dweights, there[:4], done[:4])
