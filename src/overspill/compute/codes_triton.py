# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Packed matrices in the memory of records, as kernels read them: codes and scales as float32.

A kernel gets one view of the records for each type of the planes. Codes of 4 and 8 bits are decoded
by integer operations: the bits of e2m1 and e4m3 are placed in those of a float32, whose exponent a
product with a power of two corrects, exactly, subnormal codes too. K-quants of GGUF are integers of
four bits and of one or two from another plane; minimums may be subtracted from groups of weights.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.packed_matrix import PackedMatrix
from overspill.compute.record_piece import CODES, Piece
from overspill.core.packing import Kind

E2M1, UNSIGNED, E4M3, SIGNED, IQ4_NL = range(5)
_E2M1, _E4M3, _SIGNED = tl.constexpr(E2M1), tl.constexpr(E4M3), tl.constexpr(SIGNED)
POWER, SMALL_FLOAT, FLOAT = range(3)
_POWER, _SMALL_FLOAT = tl.constexpr(POWER), tl.constexpr(SMALL_FLOAT)
_CODES = {
    Kind.MXFP4_STACK: E2M1, Kind.E2M1: E2M1, Kind.INTEGERS: UNSIGNED, Kind.E4M3: E4M3,
    Kind.INT8: SIGNED, Kind.IQ4_NL: IQ4_NL, Kind.K_QUANT: UNSIGNED,
}  # fmt: skip
_POWERS = (torch.uint8, torch.float8_e8m0fnu)


class Matrix(NamedTuple):
    """A packed matrix [rows, columns] in a record, as a constant of kernels. Each plane is given by
    the position of its first element; -1: the matrix has no such plane."""

    code: int
    bits: int
    """Bits of a code; 4 for K-quants, without the bits in the plane `high`."""
    rows: int
    columns: int
    row_block: int
    """Rows and columns that share a scale."""
    group: int
    groups: int
    """Number of scales of a row."""
    codes: int
    """Position of the codes, in bytes."""
    scale: int
    scales: int
    zeros: int
    """Position of the stored zeros; for K-quants, of the minimums."""
    zero: int
    """Constant that is subtracted from unsigned codes, besides the stored zeros."""
    factor: int
    divides: bool
    unit: int
    """Number of neighbouring int32 that have one scale and are decoded together: 16 bytes where
    possible."""
    high: int
    """Position of the high bits, in bytes; an int32 has the bits of a unit."""
    high_bits: int
    factors: int
    """Position of the factors of K-quants: one for the scales of 256 columns, or two, the second
    for minimums."""
    n_factors: int


class Planes(NamedTuple):
    """Views of records by the types of the planes of a matrix."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    factors: Tensor


def matrix_of(piece: Piece) -> Matrix:
    """Return the constants of a packed piece."""
    matrix, stored = piece.matrix, piece.stored
    assert matrix is not None
    row_block, group = matrix.scheme.block
    group = min(group or matrix.columns, matrix.columns)
    kind, scales = matrix.scheme.kind, stored["scales"].dtype
    scale = SMALL_FLOAT if scales == torch.float8_e4m3fn else FLOAT
    code, bits = _CODES[kind], matrix.scheme.bits
    k_quant = kind is Kind.K_QUANT
    stored_bits = 8 if code in (E4M3, SIGNED) else 4 if k_quant else bits
    zero = 32 if bits == 6 else 0 if k_quant else 1 << bits - 1
    is_power = scales in _POWERS and not k_quant
    return Matrix(
        code,
        stored_bits,
        matrix.rows,
        matrix.columns,
        row_block or matrix.rows,
        group,
        -(-matrix.columns // group),
        stored[CODES].begin,
        POWER if is_power else scale,
        stored["scales"].begin // scales.itemsize,
        _first(piece, "zeros"),
        zero if code == UNSIGNED else 0,
        -1 if k_quant else _first(piece, "factor"),
        matrix.divides,
        4 if group == matrix.columns else math.gcd(4, group * stored_bits // 32),
        _first(piece, "high"),
        bits - 4 if k_quant else 0,
        _first(piece, "factor") if k_quant else -1,
        stored["factor"].shape[2] if k_quant else 0,
    )


def _first(piece: Piece, field: str) -> int:
    stored = piece.stored.get(field)
    return -1 if stored is None else stored.begin // stored.dtype.itemsize


def planes_of(piece: Piece, records: Tensor) -> Planes:
    """Return the views of the bytes of records in which kernels find the planes of a packed
    piece."""

    def view(field: str) -> Tensor:
        stored = piece.stored.get(field)
        if stored is None or (stored.dtype.itemsize == 1 and stored.dtype != torch.int8):
            return records
        return records.view(stored.dtype)

    return Planes(records, view("scales"), view("zeros"), view("factor"))


def is_supported(matrix: PackedMatrix) -> bool:
    """Whether kernels can read the matrix."""
    return matrix.scheme.kind in _CODES


@triton.jit
def value_of_code(code, CODE: tl.constexpr):
    """Return codes in the lowest bits of int32 as float32."""
    if CODE == _E2M1:
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif CODE == _E4M3:
        return value_of_e4m3(code)
    elif CODE == _SIGNED:
        return ((code << 24) >> 24).to(tl.float32)
    else:
        return code.to(tl.float32)


@triton.jit
def value_of_e4m3(code):
    bits = ((code & 128) << 24) | ((code & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def load_scales(scales, row, group, inside, MATRIX: tl.constexpr):
    """Return the scales of some rows and groups as float32, without the factor of all scales."""
    return scale_of(stored_scales(scales, row, group, inside, MATRIX), MATRIX)


@triton.jit
def stored_scales(scales, row, group, inside, MATRIX: tl.constexpr):
    at = MATRIX.scales + row // MATRIX.row_block * MATRIX.groups + group
    return tl.load(scales + at, mask=inside, other=0)


@triton.jit
def scale_of(stored, MATRIX: tl.constexpr):
    """Return stored scales as float32."""
    if MATRIX.scale == _POWER:
        exponent = stored.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2**-127 is subnormal
        scale = bits.to(tl.float32, bitcast=True)
    elif MATRIX.scale == _SMALL_FLOAT:
        scale = value_of_e4m3(stored.to(tl.int32))
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def load_factor(factors, here, MATRIX: tl.constexpr):
    """Return the factor of all scales."""
    if MATRIX.factor >= 0:
        factor = tl.load(factors + MATRIX.factor, mask=here, other=1.0).to(tl.float32)
        if MATRIX.divides:
            factor = 1.0 / factor
        return factor
    else:
        return 1.0


@triton.jit
def load_group_factors(factors, row, group, inside, NUMBER: tl.constexpr, MATRIX: tl.constexpr):
    """Return the factors of K-quants for the scales or minimums of some rows and groups."""
    block = row * (MATRIX.columns // 256) + group * MATRIX.group // 256
    at = MATRIX.factors + block * MATRIX.n_factors + NUMBER
    return tl.load(factors + at, mask=inside, other=0).to(tl.float32)


@triton.jit
def load_zeros(zeros, row, group, inside, MATRIX: tl.constexpr):
    """Return the codes that stand for zero in some rows and groups, as float32."""
    stored = tl.load(zeros + MATRIX.zeros + row * MATRIX.groups + group, mask=inside, other=0)
    return stored.to(tl.float32) + MATRIX.zero


@triton.jit
def load_values(planes_codes, scales, zeros, factors, row, column, inside, MATRIX: tl.constexpr):
    """Return the values of some elements of a packed matrix: scale × code, rounded once."""
    row, column = tl.broadcast(row, column)
    if MATRIX.bits == 4:
        at = MATRIX.codes + row * (MATRIX.columns // 2) + column // 2
        code = tl.load(planes_codes + at, mask=inside, other=0).to(tl.int32)
        value = value_of_code((code >> column % 2 * 4) & 15, MATRIX.code)
    else:
        at = MATRIX.codes + row * MATRIX.columns + column
        code = tl.load(planes_codes + at, mask=inside, other=0).to(tl.int32)
        value = value_of_code(code, MATRIX.code)
    group = column // MATRIX.group
    if MATRIX.zeros >= 0:
        value -= load_zeros(zeros, row, group, inside, MATRIX)
    elif MATRIX.zero > 0:
        value -= MATRIX.zero
    return value * exact_scales(scales, factors, row, group, inside, MATRIX)


@triton.jit
def exact_scales(scales, factors, row, group, inside, MATRIX: tl.constexpr):
    """Return the scales of some rows and groups times the factor of all scales, rounded once."""
    scale = load_scales(scales, row, group, inside, MATRIX)
    if MATRIX.factor >= 0:
        factor = tl.load(factors + MATRIX.factor).to(tl.float32)
        if MATRIX.divides:
            scale = tl.div_rn(scale, factor)
        else:
            scale = scale * factor
    if MATRIX.n_factors > 0:
        scale *= load_group_factors(factors, row, group, inside, 0, MATRIX)
    return scale
