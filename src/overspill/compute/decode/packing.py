# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Packed records of experts, as the kernels of a decoding step read them."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.activation_form import Form, Function
from overspill.compute.codes_triton import (
    Matrix,
    Planes,
    is_supported,
    load_group_factors,
    matrix_of,
    planes_of,
    scale_of,
    stored_scales,
)
from overspill.compute.decode.words import words_of_units, zeros_of_words
from overspill.compute.record_format import RecordFormat
from overspill.compute.record_piece import CODES, Piece


class Packing(NamedTuple):
    """The matrices of a packed expert, as a constant of kernels. Gate and up may be rows of one
    matrix: row r of the hidden columns has gate `gate_step` × r and up `gate_step` × r + `up`."""

    gate: Matrix
    up_matrix: Matrix
    gate_step: int
    up: int
    out: Matrix
    b_in: int
    """Position of the first element of the biases."""
    b_out: int


class PackedRecords(NamedTuple):
    """The packing of records, and views of their memory by the types of their planes."""

    packing: Packing
    w_in: Planes
    w_out: Planes
    biases: Tensor


def why_not_packed(format: RecordFormat, form: Form) -> str | None:
    """Return why the kernels cannot read such records; None if they can."""
    by_tensor = [[p for p in format.pieces if p.tensor == n] for n in range(4)]
    w_in, w_out, *biases = by_tensor
    if len(w_in) > (2 if form.gated and form.function is not Function.CLAMPED else 1):
        return f"{len(w_in)} matrices in the place of one"
    if len(w_out) != 1 or any(len(pieces) > 1 for pieces in biases):
        return "matrices that are divided"
    for piece in (*w_in, *w_out):
        if piece.matrix is None:
            return "some matrices that are not packed"
        if not is_supported(piece.matrix):
            return piece.matrix.scheme.kind.value
        each = 32 // matrix_of(piece).bits
        if piece.matrix.columns % each or matrix_of(piece).group % each:
            return f"{piece.matrix.columns} columns, or groups of them, are no multiples of {each}"
    if len({_types(piece) for piece in w_in}) > 1 or len({_types(b[0]) for b in biases if b}) > 1:
        return "parts of several types"
    return None


def _types(piece: Piece) -> object:
    types = tuple((field, stored.dtype) for field, stored in piece.stored.items())
    return None if piece.matrix is None else piece.matrix.scheme, types


def packed_records(format: RecordFormat, form: Form, base: Tensor) -> PackedRecords:
    """Return the packing of records and the views of the bytes `base`, relative to which records
    are found."""
    assert why_not_packed(format, form) is None
    pieces = {n: [p for p in format.pieces if p.tensor == n] for n in range(4)}
    w_in, w_out = pieces[0], pieces[1][0]
    step, up = 1, 0
    if form.gated and len(w_in) == 1:
        step, up = (2, 1) if form.function is Function.CLAMPED else (1, format.shape.d_hidden)
    biases, first = base, [0, 0]
    for number, own in enumerate((pieces[2], pieces[3])):
        if own:
            stored = own[0].stored[CODES]
            first[number] = stored.begin // stored.dtype.itemsize
            biases = base.view(stored.dtype)
    gate, up_matrix = matrix_of(w_in[0]), matrix_of(w_in[-1])
    packing = Packing(gate, up_matrix, step, up, matrix_of(w_out), *first)
    planes = [planes_of(p, base)._replace(codes=base.view(torch.int32)) for p in (w_in[0], w_out)]
    return PackedRecords(packing, *planes, biases)


@triton.jit
def at_record(plane, offset):
    """Return a plane of the record that begins `offset` bytes behind the base."""
    size: tl.constexpr = plane.dtype.element_ty.primitive_bitwidth // 8
    return plane + tl.multiple_of(offset // size, 16)


@triton.jit
def by_places(column, MATRIX: tl.constexpr):
    """Return the position of an input of a matrix in the order of places: first come all inputs of
    the first codes of each int32, which are then neighbours."""
    each: tl.constexpr = 32 // MATRIX.bits
    return column % each * (MATRIX.columns // each) + column // each


@triton.jit
def load_units(codes, scales, offset, row, unit, there, inside, MATRIX: tl.constexpr):
    """Return the codes [rows, units, unit] of some units, each of a record of its own, an int32 of
    their high bits [rows, units], if there are any, and the stored scales [rows, units]."""
    words: tl.constexpr = MATRIX.columns * MATRIX.bits // 32
    word = words_of_units(unit, MATRIX)
    mask = there[:, None] & inside[None, :]
    own = mask[:, :, None]
    if words % MATRIX.unit != 0:
        own = own & (word < words)
    at = MATRIX.codes // 4 + row[:, None, None] * words + word
    w = tl.load(at_record(codes, offset)[None, :, None] + at, mask=own, other=0)
    group = (unit * (MATRIX.unit * 32 // MATRIX.bits) // MATRIX.group)[None, :]
    from_scales = at_record(scales, offset)[None, :]
    high = w
    if MATRIX.high_bits > 0:
        at = MATRIX.high // 4 + row[:, None] * (words // MATRIX.unit) + unit[None, :]
        high = tl.load(at_record(codes, offset)[None, :] + at, mask=mask, other=0)
    return w, high, stored_scales(from_scales, row[:, None], group, mask, MATRIX)


@triton.jit
def unit_scales(stored, factors, offset, row, unit, there, inside, MATRIX: tl.constexpr):
    """Return the scales of some units, without the factor of all scales."""
    scale = scale_of(stored, MATRIX)
    if MATRIX.n_factors > 0:
        group = (unit * (MATRIX.unit * 32 // MATRIX.bits) // MATRIX.group)[None, :]
        own, mask = at_record(factors, offset)[None, :], there[:, None] & inside[None, :]
        scale *= load_group_factors(own, row[:, None], group, mask, 0, MATRIX)
    return scale


@triton.jit
def unit_zeros(zeros, factors, offset, row, unit, there, inside, MATRIX: tl.constexpr):
    """Return the codes that stand for zero in some units, or their minimums."""
    group = (unit * (MATRIX.unit * 32 // MATRIX.bits) // MATRIX.group)[None, :]
    mask = there[:, None] & inside[None, :]
    own, of_groups = at_record(zeros, offset)[None, :], at_record(factors, offset)[None, :]
    return zeros_of_words(own, of_groups, row[:, None], group, mask, MATRIX)
