# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Products of very few rows with a dense matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.activation import Function
from overspill.compute.decode import constants
from overspill.compute.decode.activate import activate
from overspill.compute.decode.launch import after, early, power


def linear(
    x_BK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    dtype: torch.dtype | None = None,
    function: Function | None = None,
    gate: Function | None = None,
) -> Tensor:
    """A function of x @ w^T + bias, for very few rows. With `gate`, rows of x are gates, up values
    and one number: x is that function of the gates, times up values and the number's sigmoid."""
    (n, width), n_rows = w_NK.shape, len(x_BK)
    out = torch.empty(n_rows, n, dtype=dtype or x_BK.dtype, device=x_BK.device)
    tile = constants.LARGE_TILE if n * n_rows >= constants.LARGE else constants.SMALL_TILE
    block = min(tile.block, power(width))
    _linear_kernel[(triton.cdiv(n, tile.rows), n_rows)](
        x_BK, w_NK, x_BK if bias_N is None else bias_N, out, n, width, bias_N is not None,
        -1 if function is None else int(function), -1 if gate is None else int(gate), tile.rows,
        block, num_warps=tile.warps, **early(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _linear_kernel(
    x, w, bias, out, n, width, BIAS: tl.constexpr, FUNCTION: tl.constexpr, GATE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(1)
    there = rows < n
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    columns = tl.arange(0, BLOCK)
    first = w + rows.to(tl.int64)[:, None] * width + columns[None, :]
    weights = tl.load(first, mask=there[:, None] & (columns < width)[None, :], other=0.0)
    after(EARLY)
    x += batch * (width if GATE < 0 else 2 * width + 1)
    for start in range(0, width, BLOCK):
        value = tl.load(x + start + columns, mask=columns < width - start, other=0.0)
        if GATE >= 0:
            up = tl.load(x + width + start + columns, mask=columns < width - start, other=0.0)
            value = activate(value, up, value.dtype, GATE, True)
        total += weights.to(tl.float32) * value.to(tl.float32)[None, :]
        inside = columns < width - start - BLOCK
        weights = tl.load(first + start + BLOCK, mask=there[:, None] & inside[None, :], other=0.0)
    result = tl.sum(total, 1)
    if GATE >= 0:
        result *= tl.sigmoid(tl.load(x + 2 * width).to(tl.float32))
    if BIAS:
        result += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    if FUNCTION >= 0:
        result = activate(result, result, kind, FUNCTION, False)
    tl.store(out + batch * n + rows, result.to(kind), mask=there)
