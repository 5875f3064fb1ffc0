# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""The rotary embedding as one Triton kernel, with one program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate_cuda(qkv: Tensor, cos_SW: Tensor, sin_SW: Tensor, direction: float) -> Tensor:
    """A rotated copy of [B, S, 3, heads, width]; `direction` -1 rotates back."""
    qkv = qkv.contiguous()
    batch, length, _, heads, width = qkv.shape
    out = qkv.new_empty(qkv.shape)
    pairs = heads * width  # of q and k together: 2 * heads * width / 2
    with torch.cuda.device(qkv.device):
        _rotate[(batch * length,)](
            qkv,
            out,
            cos_SW,
            sin_SW,
            length,
            direction,
            PAIRS=pairs,
            HALF=width // 2,
            BLOCK=triton.next_power_of_2(pairs),
        )
    return out


@triton.jit
def _rotate(
    source,
    out,
    cos,
    sin,
    length,
    direction,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = token % length
    base = token * (3 * PAIRS)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    angle = position * HALF + pair % HALF
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0) * direction
    first_at = base + (pair // HALF) * (2 * HALF) + pair % HALF
    second_at = first_at + HALF
    first = tl.load(source + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + first_at, (first * c - second * s).to(kind), mask=inside)
    tl.store(out + second_at, (second * c + first * s).to(kind), mask=inside)
    # values are copied: they have as many elements as there are pairs
    value_at = base + 2 * PAIRS + pair
    tl.store(out + value_at, tl.load(source + value_at, mask=inside), mask=inside)
