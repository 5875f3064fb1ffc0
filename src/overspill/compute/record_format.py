"""Records of experts with packed weights: their stored parts, one behind the other."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from overspill.compute.packed_kernel import ExpertArgs, PieceArgs, Plane, packed_args, plain_args
from overspill.compute.packed_matrix import PackedMatrix, Parts
from overspill.compute.record_piece import CODES, Piece, Stored
from overspill.core.experts import ExpertShape
from overspill.core.sizes import round_up
from overspill.hardware.native import has_triton
from overspill.tiers.layout import WeightFormat

_DESCRIBE = ("indices", "size")
_ALIGN = 64
"""Alignment of the parts in bytes, so that vector instructions can read them."""


@dataclass(frozen=True)
class RecordFormat:
    """Layout of the packed weights of each expert of a model."""

    shape: ExpertShape
    pieces: tuple[Piece, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        ends = [stored.end for piece in self.pieces for stored in piece.stored.values()]
        return round_up(max(ends), _ALIGN)

    @property
    def is_packed(self) -> bool:
        return any(piece.matrix is not None for piece in self.pieces)

    @functools.cached_property
    def native(self) -> ExpertArgs | None:
        """The record for the C++ library of cpu_kernel.py; None if its kernels cannot read it."""
        pieces = [_native_piece(self.shape, piece) for piece in self.pieces]
        found = [piece for piece in pieces if piece is not None]
        if len(found) < len(pieces):
            return None
        return ExpertArgs((PieceArgs * len(found))(*found), len(found))

    def of_layer(self, layer: int) -> "RecordFormat":
        """Return this format, which is the same in all layers."""
        return self

    def unpack(self, record: Tensor, out: Tensor, threads: int = 1) -> None:
        """Fill the flat weights `out`, in their dtype, from the bytes of a record, with `threads`
        threads on the CPU."""
        for piece in self.pieces:
            if piece.matrix is None:
                piece.copy_plain(self.shape, record[None], out[None])
            else:
                stored = {field: each.of(record) for field, each in piece.stored.items()}
                rows = piece.rows_of(self.shape, out[None])[0]
                piece.matrix.unpack(Parts(**stored), rows, threads)

    def unpack_several(
        self, records: Tensor, out: Tensor, counts: Sequence[int], ends: Tensor
    ) -> None:
        """Fill the flat weights `out` [n, numel] from the bytes of records [n, nbytes]. `counts`
        are the token rows of each expert, and `ends` the cumulative counts on the device: experts
        without rows may be left out."""
        kernels = records.is_cuda and has_triton("packed experts")
        if kernels and torch.cuda.get_device_capability(records.device) >= (8, 0):
            from overspill.compute import unpack_triton

            if unpack_triton.is_supported(self.pieces):
                unpack_triton.unpack(self.shape, self.pieces, records, out, ends)
                return
        for record, weights, count in zip(records, out, counts, strict=True):
            if count:
                self.unpack(record, weights, torch.get_num_threads())


def _native_piece(shape: ExpertShape, piece: Piece) -> PieceArgs | None:
    """Return a piece for the C++ library, whose matrices have outputs as rows."""
    is_bias = len(shape.sizes[piece.tensor]) == 1
    if piece.matrix is None:
        codes = piece.stored[CODES]
        found = plain_args(codes.begin, codes.dtype) if is_bias else None
        if found is None:
            return None
        return PieceArgs(piece.tensor, found[0], piece.begin, piece.rows, found[1])
    matrix = piece.matrix
    planes = {field: Plane(each.begin, each.dtype) for field, each in piece.stored.items()}
    args = packed_args(matrix.scheme, matrix.rows, matrix.columns, matrix.divides, planes)
    if args is None or is_bias or matrix.is_transposed != shape.transposed:
        return None
    # inputs are rows of a transposed tensor, which is one piece then
    whole = piece.rows == shape.sizes[piece.tensor][0]
    if shape.transposed and not whole:
        return None
    return PieceArgs(piece.tensor, 0, 0 if whole else piece.begin, matrix.rows, args)


@dataclass(frozen=True)
class MixedFormat:
    """Records whose content differs by layer, and so may their size."""

    layers: tuple[RecordFormat, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the largest."""
        return max(format.nbytes for format in self.layers)

    def of_layer(self, layer: int) -> RecordFormat:
        return self.layers[layer]


def layer_formats(format: WeightFormat | None, n_layers: int) -> list[RecordFormat]:
    """Return the formats of the packed records of all layers; an empty list if records are
    plain."""
    if format is None:
        return []
    assert isinstance(format, RecordFormat | MixedFormat)
    return [format.of_layer(layer) for layer in range(n_layers)]


class FormatBuilder:
    """Collects the pieces of an expert."""

    def __init__(self, shape: ExpertShape) -> None:
        self._shape = shape
        self._pieces: list[Piece] = []
        self._rows: dict[int, int] = {}
        self._end = 0

    def add(
        self, tensor: int, rows: int, matrix: PackedMatrix | None, parts: Mapping[str, Tensor]
    ) -> None:
        """Add the next rows of a tensor."""
        stored: dict[str, Stored] = {}
        for field, part in parts.items():
            begin = round_up(self._end, _ALIGN)
            stored[field] = Stored(part.dtype, tuple(part.shape), begin)
            self._end = stored[field].end
        begin = self._rows.get(tensor, 0)
        self._rows[tensor] = begin + rows
        self._pieces.append(Piece(tensor, begin, rows, matrix, stored))

    def build(self) -> RecordFormat:
        return RecordFormat(self._shape, tuple(self._pieces))


def stored_parts(parts: Parts) -> dict[str, Tensor]:
    """Return the parts that records have. The other parts only describe these."""
    found = {field.name: getattr(parts, field.name) for field in fields(parts)}
    return {n: part for n, part in found.items() if part is not None and n not in _DESCRIBE}
