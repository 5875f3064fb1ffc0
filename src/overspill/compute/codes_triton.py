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
_E2M1, _UNSIGNED = tl.constexpr(E2M1), tl.constexpr(UNSIGNED)
_E4M3, _SIGNED = tl.constexpr(E4M3), tl.constexpr(SIGNED)
_IQ4_NL = tl.constexpr(IQ4_NL)
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


@triton.jit
def weight_of_word(
    word, high, zero, scale, PLACE: tl.constexpr, MATRIX: tl.constexpr, KIND: tl.constexpr
):
    """Return scale × (code - zero), or scale × code - minimum, for the code at a place of int32,
    rounded once, with few operations on integers. The result must still be multiplied by
    `lacking_factor`."""
    if MATRIX.code == _E2M1:
        bits = ((word << (28 - 4 * PLACE)) >> 6) & -0x7E400000
        value = bits.to(tl.float32, bitcast=True) * (scale * 18446744073709551616.0)  # 2**64
    elif MATRIX.code == _E4M3:
        bits = ((word << (24 - 8 * PLACE)) >> 4) & -0x78100000
        value = bits.to(tl.float32, bitcast=True) * (scale * 1152921504606846976.0)  # 2**60
    elif MATRIX.code == _IQ4_NL:
        value = value_of_iq4_nl(word, PLACE, MATRIX) * scale
    else:
        one: tl.constexpr = (1 << MATRIX.bits * (PLACE % (16 // MATRIX.bits))) / 4194304  # 2**-22
        bits = integer_of_word(word, high, PLACE, MATRIX)
        value = bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # 2**127
        if MATRIX.n_factors == 2:
            value = value * (scale * (1.0 / one)) - zero
        else:
            value -= zero * one
            value *= scale * (1.0 / one)
    return value.to(KIND)


@triton.jit
def integer_of_word(word, high, PLACE: tl.constexpr, MATRIX: tl.constexpr):
    """Return the integer at a place of int32, from 0 on, times a power of two: it stays at the
    position of its low bits in a half of the int32. As float32, these bits are a subnormal
    number."""
    HALF: tl.constexpr = 16 // MATRIX.bits
    first: tl.constexpr = MATRIX.bits * (PLACE % HALF)
    if MATRIX.code == _SIGNED:
        word = word ^ -0x7F7F7F80
    if HALF <= PLACE:
        word = word >> 16
    bits = word & (((1 << MATRIX.bits) - 1) << first)
    if MATRIX.high_bits > 0:
        if HALF <= PLACE:
            high = high >> HALF * MATRIX.high_bits
        shift: tl.constexpr = first + MATRIX.bits - PLACE % HALF * MATRIX.high_bits
        mask: tl.constexpr = ((1 << MATRIX.high_bits) - 1) << first + MATRIX.bits
        bits = bits | ((high << shift) & mask)
    return bits


@triton.jit
def value_of_iq4_nl(word, PLACE: tl.constexpr, MATRIX: tl.constexpr):
    """Return the value of the code at a place: a polynomial differs from it by less than 0.44 and
    is rounded."""
    one: tl.constexpr = 4194304 / (1 << MATRIX.bits * (PLACE % (16 // MATRIX.bits)))  # 2**22
    bits = integer_of_word(word, word, PLACE, MATRIX)
    x = bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # code / one
    value = 1.58604e-3 * (one * one * one * one) * x + 0.0310864 * (one * one * one)
    value = (value * x - 1.37193 * (one * one)) * x + 24.1738 * one
    value = value * x - 126.567
    return (value + 12582912.0) - 12582912.0  # 1.5 * 2**23


@triton.jit
def lacking_factor(MATRIX: tl.constexpr):
    """Return the factor that `weight_of_word` leaves out, about half of the factor of a code. With
    all of it, or with none, weights with large or small scales would not fit float32. Scales from
    2**-57 to 2**63 are exact."""
    if MATRIX.code == _E2M1:
        return 4611686018427387904.0  # 2**62
    elif MATRIX.code == _E4M3:
        return 1152921504606846976.0  # 2**60
    else:
        return 1.0


@triton.jit
def zeros_of_words(zeros, factors, row, group, inside, MATRIX: tl.constexpr):
    """Return the numbers that are subtracted from the codes of int32, or the minimums."""
    if MATRIX.n_factors == 2:
        factor = load_group_factors(factors, row, group, inside, 1, MATRIX)
        return load_zeros(zeros, row, group, inside, MATRIX) * factor
    elif MATRIX.zeros >= 0:
        return load_zeros(zeros, row, group, inside, MATRIX)
    elif MATRIX.code == _SIGNED:
        return 128.0
    else:
        return MATRIX.zero * 1.0


@triton.jit
def words_of_units(unit, MATRIX: tl.constexpr):
    """Return the positions of the int32 of some units in a row, [1, units, unit]."""
    return unit[None, :, None] * MATRIX.unit + tl.arange(0, MATRIX.unit)[None, None, :]


@triton.jit
def high_of_words(high, MATRIX: tl.constexpr):
    """Shift the high bits of units [rows, units] so that the bits for each word of codes are the
    lowest."""
    if MATRIX.high_bits > 0:
        first = tl.arange(0, MATRIX.unit)[None, None, :] * (8 * MATRIX.high_bits)
        return high[:, :, None] >> first
    else:
        return high


@triton.jit
def term_of_word(word, high, PLACE: tl.constexpr, MATRIX: tl.constexpr):
    """Return the code at a place of int32 as float32, with few operations on integers. A power of
    two is left out: `input_factors` multiplies the inputs by a part of it, `sum_units` the sum of
    products by the rest. `sum_units` also subtracts zeros."""
    if MATRIX.code == _IQ4_NL:
        value = value_of_iq4_nl(word, PLACE, MATRIX)
    else:
        if MATRIX.code == _E2M1:
            bits = ((word << (28 - 4 * PLACE)) >> 6) & -0x7E400000
        elif MATRIX.code == _E4M3:
            bits = ((word << (24 - 8 * PLACE)) >> 4) & -0x78100000
        else:
            bits = integer_of_word(word, high, PLACE, MATRIX)
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def input_factors(column, MATRIX: tl.constexpr):
    """Return the factors of the inputs of some columns, with which products with subnormal codes
    are exact."""
    exponent = 64 + 0 * column
    if MATRIX.code == _IQ4_NL:
        exponent = 0 * column
    elif MATRIX.code != _E2M1 and MATRIX.code != _E4M3:
        exponent -= column % (16 // MATRIX.bits) * MATRIX.bits
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def zero_term(value, PLACE: tl.constexpr, MATRIX: tl.constexpr):
    """Return the product of an input with code 1, which `sum_units` needs for zeros."""
    if MATRIX.code != _UNSIGNED and MATRIX.code != _SIGNED:
        return 0.0
    else:
        one: tl.constexpr = 1 << MATRIX.bits * (PLACE % (16 // MATRIX.bits))
        return value * (one * 1.401298464324817e-45)  # 2**-149


@triton.jit
def sum_units(products, zero_terms, zero, scale, MATRIX: tl.constexpr):
    """Return the sums of weights times inputs of some units."""
    total = tl.sum(products, 2)
    if MATRIX.code == _E2M1:
        return total * 4611686018427387904.0 * scale  # 2**62
    elif MATRIX.code == _E4M3:
        return total * 72057594037927936.0 * scale  # 2**56
    elif MATRIX.code == _IQ4_NL:
        return total * scale
    elif MATRIX.n_factors == 2:
        minimum = tl.sum(zero_terms, 2) * 38685626227668133590597632.0 * zero
        return total * 38685626227668133590597632.0 * scale - minimum
    else:
        total -= tl.sum(zero_terms, 2) * zero
        return total * 38685626227668133590597632.0 * scale  # 2**85
