"""Packed weights: the tensors that a checkpoint stores of them, and their values."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.compute.packed_matrix import BadPart, PackedMatrix, Parts
from overspill.core.errors import CheckpointError
from overspill.tiers.safetensors_stream import TensorSpec

Read = Callable[[str, int], Tensor]
"""Function that reads one matrix of a stored tensor: (name, number of the matrix)."""


@dataclass(frozen=True)
class PackedTensor:
    """Matrix of codes and scales, or a stack of such matrices, by the names of its parts."""

    name: str
    """Name of the plain tensor."""
    matrix: PackedMatrix
    stack: tuple[int, ...]
    """Dimension for the number of matrices, if there is one."""
    parts: Mapping[str, str]
    """Names of stored tensors by the fields of `Parts`."""

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of one plain matrix."""
        return self.matrix.shape

    @property
    def kind(self) -> str:
        """Description of the packing, for messages."""
        return str(self.matrix.scheme.kind)

    @property
    def is_plain(self) -> bool:
        """Whether values are stored unpacked, but in another order."""
        return False

    @property
    def spec(self) -> TensorSpec:
        """Type and shape of the plain tensor: float32 represents the products exactly."""
        return TensorSpec(torch.float32, (*self.stack, *self.matrix.shape))

    def place(self, name: str, spec: TensorSpec, number: int) -> tuple[int, tuple[int, ...]]:
        """Return the first element and shape of a matrix of the stored tensor `name`, which is a
        stack."""
        shape = spec.shape[len(self.stack) :]
        return number * math.prod(shape), shape

    def read_parts(self, read: Read, number: int) -> Parts:
        """Return the parts of one matrix. Raises if their values cannot be used."""
        parts = self.parts_of(lambda name: read(name, number))
        try:
            self.matrix.check(parts)
        except BadPart as error:
            raise self._bad(error) from error
        return parts

    def _bad(self, error: BadPart) -> CheckpointError:
        return CheckpointError(
            f"{self.parts[error.part]} {error.reason}; download the checkpoint again, or give the "
            "one in bf16 that it was made from"
        )

    def parts_of(self, read: Callable[[str], Tensor]) -> Parts:
        """Return the parts of one matrix by their names."""
        return Parts(**{field: read(name) for field, name in self.parts.items()})

    def read(self, read: Read, offset: int, out: Tensor) -> None:
        """Fill `out` with whole matrices from element `offset` on."""
        for number, part in self._matrices(offset, out):
            self.matrix.unpack(self.read_parts(read, number), part)

    def _matrices(self, offset: int, out: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield numbers and places of the matrices in `out`."""
        each = math.prod(self.matrix_shape)
        first, count = offset // each, out.numel() // each
        if (first * each, count * each) != (offset, out.numel()):
            raise ValueError(f"{self.name} is read in matrices of {each}, not {out.numel()}")
        return enumerate(out.view(count, *self.matrix_shape), first)
