"""Rotary embedding of packed queries, keys and values.

Shapes: B sequences of S tokens; packed [B, S, 3, heads, width], of which q and k are rotated.
"""

from typing import Any

import torch
from torch import Tensor

from overspill.hardware.native import has_triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (first half, second half of a head) of [B, S, ..., width] by their position;
    the tables are [S, 1, 1, width / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_packed(qkv: Tensor, cos_SW: Tensor, sin_SW: Tensor) -> Tensor:
    """qkv with q and k rotated; the tables [S, width / 2] are float32. On a GPU it is one kernel
    instead of a dozen passes over strided halves."""
    if qkv.is_cuda and has_triton("rotary embedding"):
        rotated: Tensor = _Rotate.apply(qkv, cos_SW, sin_SW)  # type: ignore[no-untyped-call]
        return rotated
    shape = (cos_SW.shape[0], 1, 1, -1)
    cos, sin = cos_SW.view(shape).to(qkv.dtype), sin_SW.view(shape).to(qkv.dtype)
    qk, v = qkv.split((2, 1), dim=2)
    return torch.cat((rotate(qk, cos, sin), v), dim=2)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos_SW: Tensor, sin_SW: Tensor) -> Tensor:
        from overspill.models.rotary_triton import rotate_cuda

        ctx.tables = cos_SW, sin_SW  # buffers of the model, not saved tensors
        return rotate_cuda(qkv, cos_SW, sin_SW, 1.0)

    @staticmethod
    def backward(ctx: Any, dqkv: Tensor) -> tuple[Tensor, None, None]:
        from overspill.models.rotary_triton import rotate_cuda

        # the gradient is rotated by the opposite angle
        cos_SW, sin_SW = ctx.tables
        return rotate_cuda(dqkv, cos_SW, sin_SW, -1.0), None, None
