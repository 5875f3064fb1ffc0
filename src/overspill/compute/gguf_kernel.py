"""Calls of the C++ library of gguf_blocks.cpp. Without it torch computes the same, about twenty
times slower."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from overspill.hardware.native import load_library

_BEST_ISA = -1


class _Planes(ctypes.Structure):
    """Mirror of `Planes` in gguf_blocks.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("codes", "high", "scales", "zeros", "factors")
    )


def _planes(tensors: Sequence[Tensor | None]) -> _Planes:
    return _Planes(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


def take_apart_native(
    number: int, blocks: Tensor, count: int, planes: Sequence[Tensor | None], isa: int = _BEST_ISA
) -> bool:
    """Fill the planes (codes, high, scales, zeros, factors) from blocks of a type; return False
    without the library. Tests select an instruction set with `isa`."""
    library = _library()
    if library is None:
        return False
    library.overspill_take_apart(number, blocks.data_ptr(), count, _planes(planes), isa)
    return True


def unpack_k_native(
    bits: int, planes: Sequence[Tensor | None], out: Tensor, threads: int, isa: int = _BEST_ISA
) -> bool:
    """Fill a matrix `out` of K-quants from its planes; return False if the library cannot."""
    library = _library()
    known = out.dtype in (torch.float32, torch.bfloat16)
    if library is None or not known or not out.is_contiguous() or out.device.type != "cpu":
        return False
    count, bf16 = out.numel() // 256, out.dtype == torch.bfloat16
    kept = [plane if plane is None else plane.contiguous() for plane in planes]
    library.overspill_unpack_k(bits, _planes(kept), count, out.data_ptr(), bf16, threads, isa)
    return True


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_name("gguf_blocks.cpp"), "gguf-blocks")
    if library is None:
        return None
    pointer, size, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    planes = ctypes.POINTER(_Planes)
    library.overspill_take_apart.argtypes = [integer, pointer, size, planes, integer]
    library.overspill_take_apart.restype = None
    library.overspill_unpack_k.argtypes = [
        integer, planes, size, pointer, integer, integer, integer,
    ]  # fmt: skip
    library.overspill_unpack_k.restype = None
    return library
