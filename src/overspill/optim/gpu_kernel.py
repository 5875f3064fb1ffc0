"""The AdamW update of kernel.cpp as a Triton kernel, with the same scalars and the same noise bits.

Imported only for CUDA records, if Triton is installed. bf16 weights and moments are passed as int16
because the kernel works on their bits. Names match kernel.cpp; keep both files in step.
"""

# Triton functions take symbolic values that have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl

from overspill.compute.launch_triton import Launch
from overspill.optim.arguments import AdamScalars, RecordState

_BLOCK = 1024


@triton.jit
def _noise(seed, index):
    x = index ^ seed
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _load_moment(pointer, offsets, mask, MOMENTS_ARE_BF16: tl.constexpr):
    value = tl.load(pointer + offsets, mask=mask, other=0)
    if MOMENTS_ARE_BF16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _store_moment(pointer, offsets, mask, value, noise16, MOMENTS_ARE_BF16: tl.constexpr):
    if MOMENTS_ARE_BF16:
        rounded = (value.to(tl.uint32, bitcast=True) + noise16) >> 16
        tl.store(pointer + offsets, rounded.to(tl.int16), mask=mask)
    else:
        tl.store(pointer + offsets, value, mask=mask)


@triton.jit
def update_elements(
    weight,
    low,
    grad,
    exp_avg,
    exp_avg_sq,
    not_finite,
    offsets,
    grad_offsets,
    index,
    mask,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    inv_sqrt_bias2,
    eps,
    grad_scale,
    seed,
    WEIGHT_IS_BF16: tl.constexpr,
    MOMENTS_ARE_BF16: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """`index` are the numbers of the elements in their records, for the noise."""
    m = _load_moment(exp_avg, offsets, mask, MOMENTS_ARE_BF16) * beta1
    v = _load_moment(exp_avg_sq, offsets, mask, MOMENTS_ARE_BF16) * beta2
    if HAS_GRAD:
        g = tl.load(grad + grad_offsets, mask=mask, other=0.0)
        g = g.to(tl.float32) * grad_scale
        m += one_minus_beta1 * g
        v += one_minus_beta2 * (g * g)

    master = tl.load(weight + offsets, mask=mask, other=0)
    if WEIGHT_IS_BF16:
        missing = tl.load(low + offsets, mask=mask, other=0).to(tl.int32)
        master = ((master.to(tl.int32) << 16) + missing).to(tl.float32, bitcast=True)
    # Plain sqrt and / are approximate on a GPU. Exact ones cost nothing: memory is the limit.
    denominator = tl.sqrt_rn(v) * inv_sqrt_bias2 + eps
    master = master * decay - step_size * tl.div_rn(m, denominator)

    if GUARDED:
        # only stores depend on it, so that no load waits for this one
        mask = mask & (tl.load(not_finite) == 0)
        if HAS_GRAD:
            refused = ~(g * g < float("inf"))  # also a NaN
            tl.store(not_finite + tl.zeros_like(index).to(tl.int32), 1, mask=refused)
    noise = _noise(seed.to(tl.uint32), index.to(tl.uint32))
    _store_moment(exp_avg, offsets, mask, m, noise & 0xFFFF, MOMENTS_ARE_BF16)
    _store_moment(exp_avg_sq, offsets, mask, v, noise >> 16, MOMENTS_ARE_BF16)
    if WEIGHT_IS_BF16:
        bits = master.to(tl.int32, bitcast=True)
        tl.store(weight + offsets, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
        tl.store(low + offsets, bits.to(tl.int16), mask=mask)
    else:
        tl.store(weight + offsets, master, mask=mask)


# Program (i, row) updates block i of a row. `seed` changes at every step and `start` from tensor to
# tensor; specialising on their values (1, multiples of 16) would recompile the kernel. Floats are
# never specialised.
@triton.jit(do_not_specialize=["seed", "start"])
def adamw_kernel(
    weight,
    low,
    grad,
    exp_avg,
    exp_avg_sq,
    not_finite,
    length,
    stride,
    grad_stride,
    start,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    inv_sqrt_bias2,
    eps,
    grad_scale,
    seed,
    WEIGHT_IS_BF16: tl.constexpr,
    MOMENTS_ARE_BF16: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    GUARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    update_elements(
        weight,
        low,
        grad,
        exp_avg,
        exp_avg_sq,
        not_finite,
        row * stride + column,
        row * grad_stride + column,
        start + column,
        column < length,
        decay,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        step_size,
        inv_sqrt_bias2,
        eps,
        grad_scale,
        seed,
        WEIGHT_IS_BF16,
        MOMENTS_ARE_BF16,
        HAS_GRAD,
        GUARDED,
    )


_launch = Launch(adamw_kernel, warps=4)


def scalar_arguments(scalars: AdamScalars) -> tuple[float, ...]:
    """As the kernels take them: a Python int of 2**31 or more would be a 64-bit argument, and
    another kernel."""
    seed = scalars.seed
    return *scalars[:-1], seed - (1 << 32) if seed >= 1 << 31 else seed


def adamw_cuda_(
    state: RecordState,
    grad: torch.Tensor | None,
    scalars: AdamScalars,
    start: int,
    not_finite: torch.Tensor | None,
) -> None:
    """Queues the update on the current stream of the record's device."""
    weight = bits(state.weight)
    if weight.numel() == 0:
        return
    length = weight.shape[-1]
    rows = weight.numel() // length
    tensors = (
        weight,
        weight if state.low is None else state.low,  # not read if None
        weight if grad is None else grad,
        bits(state.exp_avg),
        bits(state.exp_avg_sq),
        weight if not_finite is None else not_finite,
    )
    numbers = (
        length,
        weight.stride(0) if rows > 1 else 0,
        grad.stride(0) if rows > 1 and grad is not None else 0,
        start,
        *scalar_arguments(scalars),
    )
    constants = (
        state.weight.dtype == torch.bfloat16,
        state.exp_avg.dtype == torch.bfloat16,
        grad is not None,
        not_finite is not None,
        _BLOCK,
    )
    _launch((triton.cdiv(length, _BLOCK), rows), tensors, constants, numbers)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
