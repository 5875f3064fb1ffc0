# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Unpacks a matrix of several experts whose type only GGUF has: IQ4_NL, Q4_K, Q5_K or Q6_K."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.formats import IQ4_NL
from overspill.compute.launch_triton import Launch
from overspill.compute.packed_matrix import PackedMatrix
from overspill.compute.record_piece import CODES, Piece
from overspill.core.packing import Kind

_KINDS = (Kind.IQ4_NL, Kind.K_QUANT)


class _Matrix(NamedTuple):
    """A packed matrix in a record, as a constant of kernels. Each plane is given by the position of
    its first byte, a plane of float16 by its first element; -1: the matrix has no such plane."""

    bits: int
    """Bits of a code: 4, 5 or 6; 0 for IQ4_NL."""
    rows: int
    columns: int
    group: int
    codes: int
    high: int
    scales: int
    minimums: int
    factors: int


def is_supported(matrix: PackedMatrix) -> bool:
    return matrix.scheme.kind in _KINDS


def unpack_piece(
    piece: Piece, records: Tensor, out: Tensor, ends: Tensor, start: int, tile: tuple[int, int]
) -> None:
    """Fill the plain weights from element `start` of `out` [n, numel] on. Other arguments are as in
    `unpack_triton.unpack`."""
    assert piece.matrix is not None
    matrix = _matrix_of(piece.matrix, piece)
    tiles = triton.cdiv(matrix.rows, tile[0]) * triton.cdiv(matrix.columns, tile[1])
    halves = records.view(torch.float16)
    tensors = records, halves, _table(records.device), out, ends
    steps = records.stride(0), halves.stride(0), out.stride(0)
    constants = matrix, start, piece.matrix.is_transposed, *tile
    _launch((tiles, len(records)), tensors, constants, steps)


def _matrix_of(matrix: PackedMatrix, piece: Piece) -> _Matrix:
    def begin(field: str) -> int:
        return piece.stored[field].begin if field in piece.stored else -1

    plain = matrix.scheme.kind is Kind.IQ4_NL
    return _Matrix(
        0 if plain else matrix.scheme.bits,
        matrix.rows,
        matrix.columns,
        matrix.scheme.block[1] or matrix.columns,
        begin(CODES),
        begin("high"),
        begin("scales") // 2 if plain else begin("scales"),
        begin("zeros"),
        -1 if plain else begin("factor") // 2,
    )


@functools.cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(IQ4_NL, device=device)


@triton.jit
def _unpack_kernel(
    planes, halves, table, out, ends, step, halves_step, out_step, MATRIX: tl.constexpr,
    START: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the products of code and scale, less a minimum. Products have at most 24 bits, and are
    exact: fusing the subtraction with them does not change the result."""
    expert = tl.program_id(1).to(tl.int64)
    before = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) == before:
        return
    blocks = (MATRIX.columns + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < MATRIX.rows) & (column < MATRIX.columns)
    planes += expert * step
    halves += expert * halves_step
    element = row * MATRIX.columns + column
    pair = tl.load(planes + MATRIX.codes + element // 2, mask=inside, other=0).to(tl.int32)
    code = (pair >> element % 2 * 4) & 15
    group = element // MATRIX.group
    if MATRIX.bits == 0:
        scale = tl.load(halves + MATRIX.scales + group, mask=inside, other=0).to(tl.float32)
        value = tl.load(table + code) * scale
    else:
        stored = tl.load(planes + MATRIX.scales + group, mask=inside, other=0).to(tl.int32)
        if MATRIX.bits == 6:
            high = tl.load(planes + MATRIX.high + element // 4, mask=inside, other=0).to(tl.int32)
            code += ((high >> element % 4 * 2) & 3) * 16 - 32
            stored = (stored << 24) >> 24
            factors = halves + MATRIX.factors + element // 256
        else:
            factors = halves + MATRIX.factors + element // 256 * 2
        if MATRIX.bits == 5:
            high = tl.load(planes + MATRIX.high + element // 8, mask=inside, other=0).to(tl.int32)
            code += ((high >> element % 8) & 1) * 16
        factor = tl.load(factors, mask=inside, other=0).to(tl.float32)
        value = code.to(tl.float32) * (factor * stored.to(tl.float32))
        if MATRIX.bits < 6:
            minimum = tl.load(planes + MATRIX.minimums + group, mask=inside, other=0)
            second = tl.load(factors + 1, mask=inside, other=0).to(tl.float32)
            value -= second * minimum.to(tl.float32)
    at = column * MATRIX.rows + row if TRANSPOSED else element
    tl.store(out + expert * out_step + START + at, value.to(out.dtype.element_ty), mask=inside)


_launch = Launch(_unpack_kernel, 4)
