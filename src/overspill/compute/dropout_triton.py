# Triton is optional and untyped, and its compiler rejects annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Dropout of token rows as one kernel: it computes the mask of `dropout.philox` while it reads and
writes each value once. R token rows, N columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.launch_triton import Launch

_BLOCK = 256
_WARPS = 4


def drop(
    values_RN: Tensor,
    assignment_R: Tensor,
    seed: int,
    threshold: int,
    scale: float,
    site: int,
    overwrite: bool,
) -> Tensor:
    """Return the values times `scale`, with zeros where the random number is below the
    threshold."""
    out_RN = values_RN if overwrite else torch.empty_like(values_RN)
    n_rows, n_columns = values_RN.shape
    grid = n_rows, triton.cdiv(triton.cdiv(n_columns, 4), _BLOCK)
    tensors = values_RN, out_RN, assignment_R.contiguous()
    _launch(grid, tensors, (n_columns, site, _BLOCK), (seed, threshold, scale))
    return out_RN


@triton.jit
def _drop(
    in_ptr,
    out_ptr,
    assignment_ptr,
    seed,
    threshold,
    scale,
    N: tl.constexpr,
    SITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    QUARTER: tl.constexpr = (N + 3) // 4
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = number * 0
    assignment = zero + tl.load(assignment_ptr + row).to(tl.int32)
    words = tl.philox(seed, number, assignment, zero + SITE, zero)
    # With a few hundred thousand rows, offsets exceed 2^31 and need 64 bits.
    start = row.to(tl.int64) * N
    for part in tl.static_range(4):
        column = part * QUARTER + number
        here = (number < QUARTER) & (column < N)
        value = tl.load(in_ptr + start + column, mask=here, other=0.0).to(tl.float32) * scale
        value = tl.where(words[part].to(tl.int64) < threshold, 0.0, value)
        tl.store(out_ptr + start + column, value.to(out_ptr.dtype.element_ty), mask=here)


_launch = Launch(_drop, _WARPS)
