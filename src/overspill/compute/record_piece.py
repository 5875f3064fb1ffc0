"""The pieces of an expert's record with packed weights, and their places in plain weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.compute.packed_matrix import PackedMatrix
from overspill.core.experts import ExpertShape

CODES = "codes"


@dataclass(frozen=True)
class Stored:
    """One tensor in a record."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """First byte in the record."""

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * self.dtype.itemsize

    def of(self, record: Tensor) -> Tensor:
        return record[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor of an expert, packed or plain."""

    tensor: int
    """Number of the tensor: w_in, w_out, b_in, b_out."""
    begin: int
    """First row in the tensor."""
    rows: int
    matrix: PackedMatrix | None
    stored: Mapping[str, Stored]
    """Stored tensors by the fields of `Parts`; a plain piece has codes alone."""

    def copy_plain(self, shape: ExpertShape, records: Tensor, out: Tensor) -> None:
        """Copy a plain piece of records [n, nbytes] to the flat weights `out` [n, numel]."""
        stored = self.stored[CODES]
        plain = records[:, stored.begin : stored.end].view(stored.dtype)
        self.rows_of(shape, out).copy_(plain.unflatten(1, stored.shape))

    def rows_of(self, shape: ExpertShape, weights: Tensor) -> Tensor:
        """Return the rows of this piece in flat weights [n, numel], as [n, rows, ...]."""
        size, start = shape.sizes[self.tensor], shape.starts[self.tensor]
        tensor: Tensor = weights[:, start : start + math.prod(size)].unflatten(1, size)
        return tensor[:, self.begin : self.begin + self.rows]
