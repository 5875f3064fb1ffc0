"""The memory through which token rows go to CPU experts and come back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.core.sizes import round_up
from overspill.tiers.layout import ALIGN

_MAX_BYTES = 64 << 20
_MAX_ROWS = 4096
_CACHE_LINE = 64  # each of the two flags has one of its own


def max_cpu_rows(d_model: int, dtype: torch.dtype) -> int:
    """The number of token rows of one pass that the buffers hold."""
    return max(1, min(_MAX_ROWS, _MAX_BYTES // (3 * d_model * dtype.itemsize)))


@dataclass(frozen=True)
class CpuBuffers:
    """The token rows of a pass and two flags, as seen by the host or by the device."""

    x: Tensor
    dy: Tensor
    out: Tensor
    weights: Tensor
    dweights: Tensor
    ready: Tensor
    done: Tensor

    @staticmethod
    def size(rows: int, d_model: int, dtype: torch.dtype) -> int:
        """Bytes of all of them."""
        return round_up(rows * (3 * d_model * dtype.itemsize + 2 * 4) + 2 * _CACHE_LINE, ALIGN)

    @classmethod
    def cut(cls, flat: Tensor, rows: int, d_model: int, dtype: torch.dtype) -> "CpuBuffers":
        wide, narrow = rows * d_model * dtype.itemsize, rows * 4
        sizes = [_CACHE_LINE, _CACHE_LINE, wide, wide, wide, narrow, narrow]
        ready, done, *parts = flat[: sum(sizes)].split(sizes)
        x, dy, out = (part.view(dtype).view(rows, d_model) for part in parts[:3])
        weights, dweights = (part.view(torch.float32) for part in parts[3:])
        return cls(x, dy, out, weights, dweights, ready[:4], done[:4])
