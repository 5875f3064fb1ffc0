"""Rotary embedding of packed queries, keys and values.

Shapes: B sequences of S tokens; packed [B, S, 3, heads, width], of which q and k are rotated.
"""

from typing import Any

import torch
from torch import Tensor

from overspill.hardware.native import has_triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (first half, second half of a head) of [B, S, heads, width] by their position;
    the tables are [S, 1, width / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_packed(qkv: Tensor, cos_SW: Tensor, sin_SW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k rotated, and v, [B, S, heads, width] each; the tables [S, width / 2] are
    float32. On a GPU it is one kernel instead of a dozen passes over strided halves."""
    if qkv.is_cuda and has_triton("rotary embedding"):
        q, k, v = _Rotate.apply(qkv, cos_SW, sin_SW)  # type: ignore[no-untyped-call]
        return q, k, v
    cos, sin = (table.unsqueeze(1).to(qkv.dtype) for table in (cos_SW, sin_SW))
    q, k, v = qkv.unbind(2)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos_SW: Tensor, sin_SW: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from overspill.models.rotary_triton import rotate_cuda

        ctx.tables = cos_SW, sin_SW  # buffers of the model, not saved tensors
        q, k, v = qkv.unbind(2)
        q, k, v = rotate_cuda(q, k, v, cos_SW, sin_SW, 1.0).unbind(2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:
        from overspill.models.rotary_triton import rotate_cuda

        # the gradient is rotated by the opposite angle
        cos_SW, sin_SW = ctx.tables
        return rotate_cuda(dq, dk, dv, cos_SW, sin_SW, -1.0), None, None
