# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Products of very few rows with a dense matrix, with the operations before and after them."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.activation_form import Function
from overspill.compute.decode import constants
from overspill.compute.decode.activate import activate
from overspill.compute.decode.launch import after, early, power

_GATES = 1024
"""Number of gates that a program computes."""


class RowNorm(NamedTuple):
    """A norm of rows: a layer norm if it has a bias, else an RMS norm."""

    weight_K: Tensor
    bias_K: Tensor | None
    eps: float


def reads_rows_whole(w_NK: Tensor) -> bool:
    """Return whether a program of `linear` has a whole row of x at once, which a norm needs."""
    return w_NK.shape[1] <= _tile_of(w_NK.shape[0]).block


def _tile_of(n: int) -> constants.Tile:
    return constants.LARGE_TILE if n >= constants.LARGE else constants.SMALL_TILE


def linear(
    x_BK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    dtype: torch.dtype | None = None,
    function: Function | None = None,
    gate: Function | None = None,
    norm: RowNorm | None = None,
    into_BN: Tensor | None = None,
) -> Tensor:
    """Return a function of x @ w^T + bias, for very few rows. With `gate`, x is replaced by
    `gate_rows` of it. A norm, which needs whole rows, is applied to x first. Adds the result to
    `into` in place, if given."""
    (n, width), n_rows = w_NK.shape, len(x_BK)
    out = into_BN
    if out is None:
        out = torch.empty(n_rows, n, dtype=dtype or x_BK.dtype, device=x_BK.device)
    tile = _tile_of(n * n_rows)
    block = min(tile.block, power(width))
    of_norm, how, eps = (w_NK, w_NK), 0, 0.0
    if norm is not None:
        assert width <= block
        shift = norm.bias_K
        of_norm = norm.weight_K, w_NK if shift is None else shift
        how, eps = 1 if shift is None else 2, norm.eps
    _linear_kernel[(triton.cdiv(n, tile.rows), n_rows)](
        x_BK, w_NK, x_BK if bias_N is None else bias_N, *of_norm, out, n, width,
        x_BK.stride(0), eps, how, bias_N is not None, -1 if function is None else int(function),
        -1 if gate is None else int(gate), into_BN is not None, tile.rows, block,
        num_warps=tile.warps, **early(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _linear_kernel(
    x, w, bias, norm_weight, norm_bias, out, n, width, x_stride, eps, NORM: tl.constexpr,
    BIAS: tl.constexpr, FUNCTION: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(1)
    there = rows < n
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    columns = tl.arange(0, BLOCK)
    first = w + rows.to(tl.int64)[:, None] * width + columns[None, :]
    weights = tl.load(first, mask=there[:, None] & (columns < width)[None, :], other=0.0)
    if NORM > 0:
        gain = tl.load(norm_weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    if NORM > 1:
        shift = tl.load(norm_bias + columns, mask=columns < width, other=0.0).to(tl.float32)
    after(EARLY)
    x += batch * x_stride
    for start in range(0, width, BLOCK):
        value = tl.load(x + start + columns, mask=columns < width - start, other=0.0)
        if GATE >= 0:
            up = tl.load(x + width + start + columns, mask=columns < width - start, other=0.0)
            value = activate(value, up, value.dtype, GATE, True)
        value = value.to(tl.float32)
        if NORM > 1:
            value = tl.where(columns < width, value - tl.sum(value, 0) / width, 0.0)
        if NORM > 0:
            value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps) * gain
        if NORM > 1:
            value += shift
        total += weights.to(tl.float32) * value[None, :]
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
    to = out + batch * n + rows
    if ADD:
        result = result.to(tl.float32) + tl.load(to, mask=there, other=0.0).to(tl.float32)
    tl.store(to, result.to(kind), mask=there)


def gate_rows(x_BJ: Tensor, width: int, function: Function) -> Tensor:
    """Return `function` of the gates in packed rows times their up values and the sigmoid of a
    number. A packed row has `width` gates, as many up values, the number, and numbers that are not
    read."""
    out = torch.empty(len(x_BJ), width, dtype=x_BJ.dtype, device=x_BJ.device)
    block = min(_GATES, power(width))
    _gate_kernel[(triton.cdiv(width, block), len(x_BJ))](
        x_BJ, out, width, x_BJ.stride(0), int(function), block, **early(out.device)
    )
    return out


@triton.jit
def _gate_kernel(
    x, out, width, x_stride, FUNCTION: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(1)
    inside = columns < width
    kind = out.dtype.element_ty
    after(EARLY)
    x += batch * x_stride
    gate = tl.load(x + columns, mask=inside, other=0.0)
    up = tl.load(x + width + columns, mask=inside, other=0.0)
    value = activate(gate, up, kind, FUNCTION, True).to(tl.float32)
    value *= tl.sigmoid(tl.load(x + 2 * width).to(tl.float32))
    tl.store(out + batch * width + columns, value.to(kind), mask=inside)
