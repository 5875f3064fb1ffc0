"""The AdamW step on a flat record, or on a part of several records, on any device.

`adamw_` selects by device: the C++ kernel on the CPU, the Triton kernel on a GPU, and torch's fused
AdamW if a compiler or Triton is missing (slower, logged once). All three compute the result of
`torch.optim.AdamW` and round bf16 moments with the same noise.

The fp32 master of a bf16 weight is the weight plus its 16 low bits (`low`). A master then costs 2
bytes per parameter instead of 4, and the weight needs no conversion before an upload.
"""

import ctypes
import functools
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from overspill.hardware.native import has_triton, load_library
from overspill.optim.arguments import (
    AdamHyper,
    AdamScalarsStructure,
    RecordState,
    adam_scalars,
)

log = logging.getLogger("overspill")

_BEST_ISA = -1
ISA_NAMES = ("generic", "avx2", "avx512")  # in kernel.cpp's order
_FALLBACK_CHUNK = 1 << 20  # elements; bounds the temporary memory of the fallback


def adamw_(
    state: RecordState,
    grad: Tensor | None,
    hyper: AdamHyper,
    threads: int = 1,
    isa: int = _BEST_ISA,
    start: int = 0,
    not_finite: Tensor | None = None,
    added: Tensor | None = None,
) -> None:
    """Updates `state` in place. `grad` has the weight's dtype and shape, and any stride between
    rows; None means zero. On the CPU `added` may be a second gradient: the update is that of
    `grad += added`, and `grad` may be changed like that.

    `start` is the index of the first element (of each row) in its record: bf16 moments are rounded
    with noise that depends on the index. `not_finite`, one int32 of the same device, guards the
    update: nothing changes if it is not zero, and a gradient that is not finite sets it to one.
    The GPU may have changed a part of the state until then.

    On the CPU the update is complete on return and releases the GIL. On a GPU it is queued on the
    current stream. Records divided into several updates have the same bits on a GPU; on the CPU if
    the parts start at multiples of 64, because the compiler may round the rest of a loop in another
    order. `isa` selects an index of ISA_NAMES in tests.
    """
    _check(state, grad, hyper, start)
    assert added is None or (grad is not None and grad.dim() == 1 and added.shape == grad.shape)
    assert added is None or (added.dtype == state.weight.dtype and added.device.type == "cpu")
    if state.weight.is_cuda and has_triton("AdamW on the GPU"):
        from overspill.optim.gpu_kernel import adamw_cuda_

        adamw_cuda_(state, grad, adam_scalars(hyper), start, not_finite)
        return
    if not_finite is not None and _is_refused(grad, not_finite):
        return
    library = None if state.weight.is_cuda else native_library()
    for row, row_grad in _rows(state, grad):
        if library is None:
            if added is not None and row_grad is not None:
                row_grad += added
            adamw_torch_(row, row_grad, hyper, start=start)
            continue
        assert threads >= 1
        assert _BEST_ISA <= isa <= ISA_NAMES.index(kernel_name())
        library.overspill_adamw(
            row.weight.data_ptr(),
            None if row.low is None else row.low.data_ptr(),
            None if row_grad is None else row_grad.data_ptr(),
            None if added is None else added.data_ptr(),
            row.exp_avg.data_ptr(),
            row.exp_avg_sq.data_ptr(),
            row.weight.numel(),
            start,
            row.weight.dtype == torch.bfloat16,
            row.exp_avg.dtype == torch.bfloat16,
            ctypes.byref(AdamScalarsStructure(*adam_scalars(hyper))),
            threads,
            isa,
        )


def _is_refused(grad: Tensor | None, not_finite: Tensor) -> bool:
    """Whether the guard is set, now or because of this gradient; waits for the device."""
    if grad is not None:
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        not_finite.logical_or_(~torch.isfinite(norm))
    return bool(not_finite.item())


def _rows(state: RecordState, grad: Tensor | None) -> Iterator[tuple[RecordState, Tensor | None]]:
    if state.weight.dim() == 1:
        yield state, grad
        return
    for row in range(len(state.weight)):
        parts = RecordState(*(None if part is None else part[row] for part in state))  # type: ignore[arg-type]
        yield parts, None if grad is None else grad[row]


def accumulate_(into: Tensor, grad: Tensor, threads: int = 1, isa: int = _BEST_ISA) -> float:
    """Computes into += grad with torch's rounding. Returns the sum of squares of the result, for
    which it waits if the device is a GPU."""
    assert into.dtype == grad.dtype
    assert into.dtype in (torch.bfloat16, torch.float32)
    assert into.device == grad.device
    assert into.numel() == grad.numel()
    assert into.is_contiguous()
    assert grad.is_contiguous()
    library = None if into.is_cuda else native_library()
    if library is None:
        into += grad.view_as(into)
        parts = into.view(-1).split(_FALLBACK_CHUNK)
        squares = [part.double().square().sum() for part in parts]
        return float(torch.stack(squares).sum()) if squares else 0.0
    assert threads >= 1
    assert _BEST_ISA <= isa <= ISA_NAMES.index(kernel_name())
    is_bf16 = into.dtype == torch.bfloat16
    return float(
        library.overspill_accumulate(
            into.data_ptr(), grad.data_ptr(), into.numel(), is_bf16, threads, isa
        )
    )


def join_master(weight: Tensor, low: Tensor) -> Tensor:
    """Returns the fp32 master of a bf16 weight and its low bits as a new tensor."""
    assert weight.dtype == torch.bfloat16
    assert low.dtype == torch.int16
    return ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split_master_(master: Tensor, weight: Tensor, low: Tensor) -> None:
    """Writes the fp32 `master` to a bf16 weight (rounded half up) and its low bits."""
    assert master.dtype == torch.float32
    assert weight.dtype == torch.bfloat16
    assert low.dtype == torch.int16
    bits = master.view(torch.int32)
    weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
    low.copy_(bits)  # the conversion drops the upper bits


def kernel_name() -> str:
    """The CPU kernel in use: "avx512", "avx2" or "generic"; "torch" without a compiler."""
    library = native_library()
    return "torch" if library is None else str(library.overspill_isa().decode())


def _check(state: RecordState, grad: Tensor | None, hyper: AdamHyper, start: int) -> None:
    weight, low, exp_avg, exp_avg_sq = state
    assert weight.dtype in (torch.bfloat16, torch.float32)
    assert (low is not None) == (weight.dtype == torch.bfloat16)
    assert low is None or low.dtype == torch.int16
    assert exp_avg.dtype == exp_avg_sq.dtype
    assert exp_avg.dtype in (torch.bfloat16, torch.float32)
    assert grad is None or grad.dtype == weight.dtype
    for tensor in (weight, low, exp_avg, exp_avg_sq, grad):
        if tensor is not None:
            assert tensor.device == weight.device
            assert tensor.shape == weight.shape
            assert tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
            assert tensor is grad or tensor.stride() == weight.stride()
    assert weight.dim() in (1, 2)
    assert start + weight.shape[-1] < 1 << 32  # the index of the noise has 32 bits
    assert hyper.step >= 1


@functools.cache
def native_library() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_name("kernel.cpp"), "adamw")
    if library is None:
        log.warning("AdamW on the CPU uses torch's fused AdamW, which is about half as fast")
        return None
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    scalars = ctypes.POINTER(AdamScalarsStructure)
    library.overspill_isa.argtypes = []
    library.overspill_isa.restype = ctypes.c_char_p
    tensors, flags = [pointer] * 6, [integer] * 2
    library.overspill_adamw.argtypes = [*tensors, size, size, *flags, scalars, integer, integer]
    library.overspill_adamw.restype = None
    library.overspill_accumulate.argtypes = [pointer, pointer, size, integer, integer, integer]
    library.overspill_accumulate.restype = ctypes.c_double
    return library


def adamw_torch_(
    state: RecordState,
    grad: Tensor | None,
    hyper: AdamHyper,
    chunk: int = _FALLBACK_CHUNK,
    start: int = 0,
) -> None:
    """Update one row as `adamw_`, with torch operations, `chunk` elements at a time."""
    device = state.weight.device
    step = torch.full((), hyper.step, dtype=torch.float32, device=device)
    seed = adam_scalars(hyper).seed
    for begin in range(0, state.weight.numel(), chunk):
        piece = slice(begin, begin + chunk)
        weight = state.weight[piece]
        low = None if state.low is None else state.low[piece]
        master = weight if low is None else join_master(weight, low)
        scaled = torch.zeros_like(master)
        if grad is not None:
            scaled.copy_(grad[piece]).mul_(hyper.grad_scale)
        exp_avg, exp_avg_sq = state.exp_avg[piece].float(), state.exp_avg_sq[piece].float()
        torch._fused_adamw_(
            [master],
            [scaled],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            lr=hyper.lr,
            beta1=float(hyper.beta1),
            beta2=float(hyper.beta2),
            weight_decay=hyper.weight_decay,
            eps=float(hyper.eps),
            amsgrad=False,
            maximize=False,
        )
        if low is not None:
            split_master_(master, weight, low)
        if state.exp_avg.dtype == torch.bfloat16:
            noise = _noise(seed, start + begin, weight.numel(), device)
            _round_moment_(state.exp_avg[piece], exp_avg, noise & 0xFFFF)
            _round_moment_(state.exp_avg_sq[piece], exp_avg_sq, noise >> 16)


def _noise(seed: int, begin: int, numel: int, device: torch.device) -> Tensor:
    """`noise` of kernel.cpp in int64; overflow does not change the lower 32 bits."""
    x = torch.arange(begin, begin + numel, dtype=torch.int64, device=device) ^ seed
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def _round_moment_(into: Tensor, value: Tensor, noise16: Tensor) -> None:
    into.view(torch.int16).copy_((value.view(torch.int32) + noise16.int()) >> 16)
