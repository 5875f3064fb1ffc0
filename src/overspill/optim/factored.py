"""The AdamW step over a record whose gradient is given by its factors.

The gradient of few token rows is a product of these rows, which are smaller. The step forms it
piece by piece, in the caches: it is neither written to memory nor read from there.
"""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.compute.cpu_kernel import factor_row_bytes
from overspill.core.experts import ExpertShape
from overspill.hardware.native import load_library
from overspill.optim.arguments import AdamHyper, AdamScalarsStructure, RecordState, adam_scalars

_BEST_ISA = -1


class Factors(NamedTuple):
    """Rows that the backward of a CPU expert has left (`GradientKind.FACTORED`)."""

    memory: Tensor
    """Flat; begins with the first row."""
    rows: int
    shape: ExpertShape


class _FactorArgs(ctypes.Structure):
    """`FactorArgs` of factors.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "d", "h")),
        *((name, ctypes.c_int32) for name in ("gated", "bias", "transposed", "bf16")),
    )


def is_available() -> bool:
    return factored_library() is not None


def adamw_factored_(
    state: RecordState,
    factors: Factors,
    hyper: AdamHyper,
    threads: int = 1,
    isa: int = _BEST_ISA,
) -> None:
    """`adamw_` on the CPU with the float32 gradient that `factors` give, of a whole record."""
    weight = state.weight
    assert weight.numel() == factors.shape.numel
    assert weight.dtype == factors.memory.dtype
    assert all(part is None or part.is_contiguous() for part in state)
    _kernels().overspill_adamw_factored(
        ctypes.byref(_args(factors)),
        weight.data_ptr(),
        None if state.low is None else state.low.data_ptr(),
        state.exp_avg.data_ptr(),
        state.exp_avg_sq.data_ptr(),
        state.exp_avg.dtype == torch.bfloat16,
        ctypes.byref(AdamScalarsStructure(*adam_scalars(hyper))),
        threads,
        isa,
    )


def form_gradient(factors: Factors, into: Tensor, threads: int = 1, isa: int = _BEST_ISA) -> float:
    """Writes the gradient into `into`, other memory than that of the factors. Returns the sum of
    its squares."""
    assert into.numel() == factors.shape.numel
    assert into.dtype == factors.memory.dtype
    assert into.is_contiguous()
    return float(
        _kernels().overspill_form_gradient(
            ctypes.byref(_args(factors)), into.data_ptr(), threads, isa
        )
    )


def square_of(factors: Factors, threads: int = 1, isa: int = _BEST_ISA) -> float:
    """The sum of squares of the gradient, from the products of its rows with each other."""
    return float(_kernels().overspill_gradient_square(ctypes.byref(_args(factors)), threads, isa))


def _args(factors: Factors) -> _FactorArgs:
    memory, rows, shape = factors
    assert memory.dtype in (torch.bfloat16, torch.float32)
    assert memory.device.type == "cpu"
    assert memory.is_contiguous()
    assert memory.nbytes >= rows * factor_row_bytes(shape, memory.dtype)
    is_bf16 = memory.dtype == torch.bfloat16
    sizes = shape.d_model, shape.d_hidden, shape.gated, shape.bias, shape.transposed
    return _FactorArgs(memory.data_ptr(), rows, *sizes, is_bf16)


def _kernels() -> ctypes.CDLL:
    library = factored_library()
    assert library is not None, "call is_available first"
    return library


@functools.cache
def factored_library() -> ctypes.CDLL | None:
    """None without a compiler."""
    library = load_library(Path(__file__).with_name("factored.cpp"), "factored-adamw")
    if library is None:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    ends = [integer, integer]
    library.overspill_adamw_factored.argtypes = [*[pointer] * 5, integer, pointer, *ends]
    library.overspill_adamw_factored.restype = None
    library.overspill_form_gradient.argtypes = [pointer, pointer, *ends]
    library.overspill_form_gradient.restype = ctypes.c_double
    library.overspill_gradient_square.argtypes = [pointer, *ends]
    library.overspill_gradient_square.restype = ctypes.c_double
    return library
