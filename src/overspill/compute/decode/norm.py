# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""RMS norms and layer norms, and the sums before them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.decode.cpu import CpuRows, await_cpu
from overspill.compute.decode.launch import after, early, power


def add_norm(
    residual_BD: Tensor,
    parts: list[Tensor],
    weight_D: Tensor,
    eps: float,
    host: CpuRows | None = None,
    bias_D: Tensor | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Tensor:
    """Adds up to two parts [B, D] and the rows of the CPU to the residual, in place; returns its
    RMS norm, or with a bias its layer norm, multiplied by `scale`. `shift` is added to the
    weight."""
    n_rows, width = residual_BD.shape
    out = torch.empty_like(residual_BD)
    a, b = (*parts, *([residual_BD] * (2 - len(parts))))
    rows, how = ((residual_BD,) * 3, 0) if host is None else (host, host.prepare())
    _add_norm_kernel[(n_rows,)](
        residual_BD, a, b, *rows, weight_D, weight_D if bias_D is None else bias_D, out, width, eps,
        scale, shift, len(parts), how, bias_D is not None, out.is_cuda, power(width), num_warps=8,
        **early(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _add_norm_kernel(
    residual, a, b, host, missed, done, weight, bias, out, width, eps, scale, shift,
    N_PARTS: tl.constexpr, HOST: tl.constexpr, BIAS: tl.constexpr, ON_GPU: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    w = (tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + shift) * scale
    if BIAS:
        added = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32) * scale
    after(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = row * width + columns
    x = tl.load(residual + at, mask=inside, other=0.0)
    if N_PARTS > 0:
        total = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
        if N_PARTS > 1:
            total += tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
        if HOST > 0:
            count = tl.load(missed + row)
            if HOST == 1:
                await_cpu(done, count, ON_GPU)
            own = inside & (count > 0)
            total += tl.load(host + at, mask=own, other=0.0)
        x = (x.to(tl.float32) + total).to(residual.dtype.element_ty)
        tl.store(residual + at, x, mask=inside)
    wide = x.to(tl.float32)
    if BIAS:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / width, 0.0)
    result = w * (wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps))
    if BIAS:
        result += added
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
