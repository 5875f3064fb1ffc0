"""A packed weight: what a checkpoint stores of it, and its values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.compute.packed_matrix import BadPart, PackedMatrix, Parts
from overspill.core.errors import CheckpointError
from overspill.tiers.safetensors_stream import TensorSpec

Read = Callable[[str, int], Tensor]
"""Reads one matrix of a stored tensor: (name, number of the matrix)."""


@dataclass(frozen=True)
class PackedTensor:
    """A matrix of codes and scales, or a stack of such matrices, by the names of its parts."""

    name: str
    """Of the plain tensor."""
    matrix: PackedMatrix
    stack: tuple[int, ...]
    """Number of matrices if there is a dimension for it."""
    parts: Mapping[str, str]
    """The names of stored tensors by the fields of `Parts`."""

    @property
    def spec(self) -> TensorSpec:
        """Type and shape of the plain tensor: float32 holds the products exactly."""
        return TensorSpec(torch.float32, (*self.stack, *self.matrix.shape))

    def read_parts(self, read: Read, number: int) -> Parts:
        """The parts of one matrix. Raises if their values cannot be used."""
        parts = self.parts_of(lambda name: read(name, number))
        try:
            self.matrix.check(parts)
        except BadPart as error:
            raise CheckpointError(
                f"{self.parts[error.part]} {error.reason}; download the checkpoint again, or give "
                "the one in bf16 that it was made from"
            ) from error
        return parts

    def parts_of(self, read: Callable[[str], Tensor]) -> Parts:
        """The parts by their names."""
        return Parts(**{field: read(name) for field, name in self.parts.items()})

    def read(self, read: Read, offset: int, out: Tensor) -> None:
        """Fills `out` with whole matrices from element `offset` on."""
        each = self.matrix.rows * self.matrix.columns
        first, count = offset // each, out.numel() // each
        if (first * each, count * each) != (offset, out.numel()):
            raise ValueError(f"{self.name} is read in matrices of {each}, not {out.numel()}")
        for number, part in enumerate(out.view(count, *self.matrix.shape), first):
            self.matrix.unpack(self.read_parts(read, number), part)
