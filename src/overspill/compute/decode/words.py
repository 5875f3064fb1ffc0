# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Codes of packed matrices in int32, as the kernels of a decoding step decode them.

A unit is a few neighbouring int32 of a row with one scale; a place is the position of a code in an
int32. Decoding takes few operations on integers: powers of two are left out, and are multiplied
once, with the inputs, the scales or the sums.
"""

import triton
import triton.language as tl

from overspill.compute.codes_triton import (
    E2M1,
    E4M3,
    IQ4_NL,
    SIGNED,
    UNSIGNED,
    load_group_factors,
    load_zeros,
)

_E2M1, _UNSIGNED = tl.constexpr(E2M1), tl.constexpr(UNSIGNED)
_E4M3, _SIGNED = tl.constexpr(E4M3), tl.constexpr(SIGNED)
_IQ4_NL = tl.constexpr(IQ4_NL)


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
