# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""The rotary embedding as one Triton kernel, with one program per token."""

import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.launch_triton import Launch


def rotate_cuda(
    q: Tensor, k: Tensor, v: Tensor, cos_SW: Tensor, sin_SW: Tensor, direction: float
) -> Tensor:
    """Pack q, k and v, [B, S, heads, width] each, into a new [B, S, 3, heads, width], with q and k
    rotated; `direction` -1 rotates back."""
    if not (q.stride() == k.stride() == v.stride() and q.stride(-1) == 1):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    batch, length, heads, width = q.shape
    out = q.new_empty(batch, length, 3, heads, width)
    pairs = heads * width // 2
    constants = pairs, width // 2, triton.next_power_of_2(pairs)
    numbers = length, *q.stride()[:3], direction
    _launch((batch * length, 1), (q, k, v, out, cos_SW, sin_SW), constants, numbers)
    return out


@triton.jit
def _rotate(
    q,
    k,
    v,
    out,
    cos,
    sin,
    length,
    batch_stride,
    token_stride,
    head_stride,
    direction,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = token % length
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    head, column = pair // HALF, pair % HALF
    c = tl.load(cos + position * HALF + column, mask=inside, other=0.0)
    s = tl.load(sin + position * HALF + column, mask=inside, other=0.0) * direction
    source_at = (token // length) * batch_stride + position * token_stride
    source_at += head * head_stride + column
    out_at = token * (6 * PAIRS) + head * (2 * HALF) + column
    _turn(q, source_at, out, out_at, c, s, inside, HALF)
    _turn(k, source_at, out, out_at + 2 * PAIRS, c, s, inside, HALF)
    for half in tl.static_range(2):  # values are copied
        value = tl.load(v + source_at + half * HALF, mask=inside)
        tl.store(out + out_at + 4 * PAIRS + half * HALF, value, mask=inside)


@triton.jit
def _turn(source, source_at, out, out_at, c, s, inside, HALF: tl.constexpr):
    first = tl.load(source + source_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + source_at + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + out_at, (first * c - second * s).to(kind), mask=inside)
    tl.store(out + out_at + HALF, (second * c + first * s).to(kind), mask=inside)


_launch = Launch(_rotate, warps=4)
