# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Unpacks several experts: one launch for each packed matrix of an expert."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from overspill.compute import codes_triton, unpack_gguf_triton
from overspill.compute.codes_triton import load_values, matrix_of, planes_of
from overspill.compute.launch_triton import Launch
from overspill.compute.record_piece import Piece
from overspill.core.experts import ExpertShape

_TILE = 32, 128
"""Rows and columns of a matrix that a program unpacks."""


def is_supported(pieces: Sequence[Piece]) -> bool:
    """Whether kernels can read all pieces of a record."""
    packed = (piece.matrix for piece in pieces if piece.matrix is not None)
    return all(
        codes_triton.is_supported(matrix) or unpack_gguf_triton.is_supported(matrix)
        for matrix in packed
    )


def unpack(
    shape: ExpertShape, pieces: Sequence[Piece], records: Tensor, out: Tensor, ends: Tensor
) -> None:
    """Fill the flat weights `out` [n, numel] from the bytes of records [n, nbytes]. `ends` are the
    cumulative numbers of token rows: experts without rows are left out."""
    for piece in pieces:
        if piece.matrix is None:
            piece.copy_plain(shape, records, out)
            continue
        width = shape.sizes[piece.tensor][-1]
        start = shape.starts[piece.tensor] + piece.begin * width
        if unpack_gguf_triton.is_supported(piece.matrix):
            unpack_gguf_triton.unpack_piece(piece, records, out, ends, start, _TILE)
            continue
        matrix = matrix_of(piece)
        tiles = triton.cdiv(matrix.rows, _TILE[0]) * triton.cdiv(matrix.columns, _TILE[1])
        tensors = *planes_of(piece, records), out, ends
        constants = matrix, start, piece.matrix.is_transposed, *_TILE
        steps = tuple(each.stride(0) for each in tensors[:5])
        _launch((tiles, len(records)), tensors, constants, steps)


@triton.jit
def _unpack_kernel(
    codes, scales, zeros, factors, out, ends, codes_step, scales_step, zeros_step, factors_step,
    out_step, MATRIX: tl.constexpr, START: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    before = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) == before:
        return
    blocks = (MATRIX.columns + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < MATRIX.rows) & (column < MATRIX.columns)
    value = load_values(
        codes + expert * codes_step, scales + expert * scales_step, zeros + expert * zeros_step,
        factors + expert * factors_step, row, column, inside, MATRIX,
    )  # fmt: skip
    at = row * MATRIX.columns + column
    if TRANSPOSED:
        at = column * MATRIX.rows + row
    to = out + expert * out_step + START + at
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)


_launch = Launch(_unpack_kernel, 4)
