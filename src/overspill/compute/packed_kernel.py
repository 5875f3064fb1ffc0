"""Packed matrices for the C++ library of cpu_kernel.py: their description, and calls that unpack
them. Values are the same, bit for bit, as those that torch operations compute."""

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.compute.cpu_kernel import ISA_NAMES, cpu_library
from overspill.compute.formats import E2M1, IQ4_NL
from overspill.core.packing import Kind, Scheme

# as in cpu_format.h
_NIBBLES, _E4M3, _INT8, _UINT8 = range(4)
_NUMBERS = {
    torch.uint8: 0,  # E8M0
    torch.float8_e8m0fnu: 0,
    torch.float8_e4m3fn: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float32: 4,
}
_ZEROS = {torch.int8: 5, torch.int16: 6}
_INT4 = tuple(float(code - 8) for code in range(16))
_VALUES = {Kind.INTEGERS: (_INT4, 1.0), Kind.IQ4_NL: (IQ4_NL, 1.0)}
"""Values of codes of four bits and their unit; all other kinds are e2m1."""


class Plane(NamedTuple):
    """Address of a contiguous part of a packed matrix, and the type of its numbers."""

    begin: int
    dtype: torch.dtype


class PackedArgs(ctypes.Structure):
    """Mirror of `PackedMatrix` in cpu_format.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns", "row_block", "group")),
        *((name, ctypes.c_int64) for name in ("codes", "scales", "zeros", "factor")),
        *(
            (name, ctypes.c_int32)
            for name in ("code_type", "scale_type", "zero_type", "factor_type", "divides")
        ),
        ("unit", ctypes.c_float),
        ("values", ctypes.c_float * 16),
    )


def packed_args(
    scheme: Scheme, rows: int, columns: int, divides: bool, planes: Mapping[str, Plane]
) -> PackedArgs | None:
    """Return the arguments for a matrix whose rows are the outputs; None if the library does not
    have its format. The keys of `planes` are fields of the `Parts` that `PackedMatrix.by_rows`
    returns."""
    values, unit = _VALUES.get(scheme.kind, (E2M1, 0.5))
    code_type = _code_type(scheme)
    scales, zeros, factor = planes["scales"], planes.get("zeros"), planes.get("factor")
    known = scales.dtype in _NUMBERS and (factor is None or factor.dtype in _NUMBERS)
    if code_type is None or not known or (zeros is not None and zeros.dtype not in _ZEROS):
        return None
    return PackedArgs(
        rows=rows,
        columns=columns,
        row_block=scheme.block[0] or rows,
        group=scheme.block[1] or columns,
        codes=planes["codes"].begin,
        scales=scales.begin,
        zeros=-1 if zeros is None else zeros.begin,
        factor=-1 if factor is None else factor.begin,
        code_type=code_type,
        scale_type=_NUMBERS[scales.dtype],
        zero_type=0 if zeros is None else _ZEROS[zeros.dtype],
        factor_type=0 if factor is None else _NUMBERS[factor.dtype],
        divides=divides,
        unit=unit,
        values=(ctypes.c_float * 16)(*values),
    )


class PieceArgs(ctypes.Structure):
    """Mirror of `PackedPiece` in cpu_format.h."""

    _fields_ = (
        ("tensor", ctypes.c_int32),
        ("plain_type", ctypes.c_int32),
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("matrix", PackedArgs),
    )


class ExpertArgs(ctypes.Structure):
    """Mirror of `PackedExpert` in cpu_format.h."""

    _fields_ = (("pieces", ctypes.POINTER(PieceArgs)), ("count", ctypes.c_int64))


def plain_args(begin: int, dtype: torch.dtype) -> tuple[int, PackedArgs] | None:
    """Return the type and place of plain numbers; None if the library does not have their type."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    return _NUMBERS[dtype], PackedArgs(codes=begin)


def _code_type(scheme: Scheme) -> int | None:
    match scheme.kind:
        case Kind.MXFP4_STACK | Kind.E2M1 | Kind.IQ4_NL:
            return _NIBBLES
        case Kind.INTEGERS:
            return _NIBBLES if scheme.bits == 4 else _UINT8
        case Kind.E4M3:
            return _E4M3
        case Kind.INT8:
            return _INT8
    return None


def unpack_rows(args: PackedArgs, out: Tensor, threads: int, isa: str | None = None) -> bool:
    """Fill `out` [rows, columns] from planes at the addresses of `args`. Return False without the
    library, or if it does not have the type or the strides of `out`. `isa` is as in
    `kernel_forward`."""
    library = cpu_library()
    bf16 = out.dtype == torch.bfloat16
    row, column = out.stride()
    one = 1 in (row, column) or out.numel() <= 1
    if library is None or not (bf16 or out.dtype == torch.float32) or not one:
        return False
    if column == 1 and row < args.columns and args.rows > 1:
        return False
    number = -1 if isa is None else ISA_NAMES.index(isa)
    matrix = ctypes.byref(args), None
    library.overspill_unpack(*matrix, out.data_ptr(), row, column, bf16, threads, number)
    return True


def repack_awq(words: Tensor) -> Tensor | None:
    """Return [K, N / 8] words of AWQ as [N, K / 8] words of eight columns in their order; None
    without the library, or if eight does not divide K."""
    library = cpu_library()
    k, n = words.shape[0], 8 * words.shape[1]
    if library is None or k % 8 or words.device.type != "cpu":
        return None
    out = words.new_empty(n, k // 8)
    library.overspill_repack_awq(words.contiguous().data_ptr(), k, n, out.data_ptr())
    return out
