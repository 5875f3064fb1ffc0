# Triton is optional and untyped, and its compiler rejects annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Fused activation kernels: every element is read once and written once.

Arithmetic is float32 for all dtypes. R are token rows, H hidden columns. In backward, one program
processes one row, because the gradient of a routing weight is a sum over its row. The width is a
compile-time constant: a model has one width, and the compiler can vectorise better.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.activation_form import Form, Function
from overspill.compute.launch_triton import Launch

_BLOCK = 1024
_WARPS = 4
_GELU = tl.constexpr(int(Function.GELU))
_SILU = tl.constexpr(int(Function.SILU))
_RELU = tl.constexpr(int(Function.RELU))
_RELU2 = tl.constexpr(int(Function.RELU2))


def activate(h: Tensor, form: Form) -> Tensor:
    h = h.contiguous()
    n_rows, n_hidden = h.shape[0], h.shape[1] // (2 if form.gated else 1)
    a_RH = h.new_empty(n_rows, n_hidden)
    grid = n_rows, triton.cdiv(n_hidden, _BLOCK)
    _launch_forward(grid, (h, a_RH), (n_hidden, int(form.function), form.gated, _BLOCK))
    return a_RH


def activate_backward(
    h: Tensor, da_RH: Tensor, row_weight_R: Tensor, form: Form, overwrite_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (weighted activation, dh, drow_weight); the first overwrites `da_RH`.

    Writing in place is safe: each element is read and then overwritten by the same program.
    """
    h, da_RH = h.contiguous(), da_RH.contiguous()
    row_weight_R = row_weight_R.to(torch.float32).contiguous()
    n_rows, n_hidden = da_RH.shape
    dh = h if overwrite_h else torch.empty_like(h)
    drow_weight_R = row_weight_R.new_empty(n_rows)
    tensors = h, da_RH, row_weight_R, da_RH, dh, drow_weight_R
    _launch_backward((n_rows, 1), tensors, (n_hidden, int(form.function), form.gated, _BLOCK))
    return da_RH, dh, drow_weight_R


@triton.jit
def value_of(x, FUNCTION: tl.constexpr):
    """Return the value of a `Function` for float32 arguments."""
    if FUNCTION == _GELU:
        value = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == _SILU:
        value = x / (1.0 + tl.exp(-x))
    else:
        tl.static_assert((FUNCTION == _RELU) | (FUNCTION == _RELU2))
        value = tl.where(x <= 0.0, 0.0, x)  # NaN stays NaN
        if FUNCTION == _RELU2:
            value *= value
    return value


@triton.jit
def _with_slope(x, FUNCTION: tl.constexpr):
    """Return the value of a function and its derivative."""
    if FUNCTION == _GELU:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    elif FUNCTION == _SILU:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value = x * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    else:
        value = value_of(x, FUNCTION)
        slope = tl.where(x <= 0.0, 0.0, 2.0 * x if FUNCTION == _RELU2 else 1.0)
    return value, slope


@triton.jit
def _forward(
    h_ptr,
    a_ptr,
    N_HIDDEN: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # With a few hundred thousand rows, offsets exceed 2^31 and need 64 bits.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N_HIDDEN
    gate_ptr = h_ptr + row * (2 if GATED else 1) * N_HIDDEN
    gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    a = value_of(gate, FUNCTION)
    if GATED:
        a *= tl.load(gate_ptr + N_HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(a_ptr + row * N_HIDDEN + cols, a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    h_ptr,
    da_ptr,
    row_weight_ptr,
    weighted_ptr,
    dh_ptr,
    drow_weight_ptr,
    N_HIDDEN: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(row_weight_ptr + row)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, N_HIDDEN, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < N_HIDDEN
        da = tl.load(da_ptr + row * N_HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
        in_row = row * (2 if GATED else 1) * N_HIDDEN
        gate = tl.load(h_ptr + in_row + cols, mask=mask, other=0.0).to(tl.float32)
        value, slope = _with_slope(gate, FUNCTION)
        a, dgate = value, da * weight * slope
        if GATED:
            up = tl.load(h_ptr + in_row + N_HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
            a, dgate = value * up, dgate * up
            dup = da * weight * value
            tl.store(dh_ptr + in_row + N_HIDDEN + cols, dup.to(dh_ptr.dtype.element_ty), mask=mask)
        tl.store(dh_ptr + in_row + cols, dgate.to(dh_ptr.dtype.element_ty), mask=mask)
        total += a * da
        weighted = (a * weight).to(weighted_ptr.dtype.element_ty)
        tl.store(weighted_ptr + row * N_HIDDEN + cols, weighted, mask=mask)
    tl.store(drow_weight_ptr + row, tl.sum(total, axis=0))


_launch_forward, _launch_backward = Launch(_forward, _WARPS), Launch(_backward, _WARPS)
