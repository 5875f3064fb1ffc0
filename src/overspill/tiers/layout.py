"""The layout of an expert's records: its weights in one flat buffer, its optimizer states in
another. Sizes are multiples of ALIGN, as direct I/O requires."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from overspill.core.experts import ExpertShape
from overspill.core.sizes import round_up

ALIGN = 4096


@dataclass(frozen=True)
class Section:
    """One optimizer state of an expert inside its state record."""

    name: str
    dtype: torch.dtype
    offset: int


class WeightFormat(Protocol):
    """How weights are packed in the records of all experts, which have the same size."""

    @property
    def nbytes(self) -> int: ...

    def of_layer(self, layer: int) -> "LayerFormat": ...


class LayerFormat(Protocol):
    """How weights are packed in the records of a layer's experts."""

    def unpack(self, record: Tensor, out: Tensor) -> None:
        """Fills the flat weights `out`, in their dtype, from the bytes of a record."""

    def unpack_several(
        self, records: Tensor, out: Tensor, counts: Sequence[int], ends: Tensor
    ) -> None:
        """Fills the flat weights `out` [n, numel] from the bytes of records [n, nbytes]. `counts`
        are the token rows of each expert, and `ends` the same on the device, cumulated: experts
        without rows may be left out."""


@dataclass(frozen=True)
class RecordLayout:
    """Sizes and views of an expert's weight record and state record.

    With bf16 weights the fp32 master is the weight plus its 16 low bits (`low`), so weights,
    master and both moments take 12 bytes per parameter, as with fp32 weights. Packed weights are
    bytes, of which `dtype` is computed; they have no states.
    """

    shape: ExpertShape
    dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32
    format: WeightFormat | None = None

    @property
    def stored(self) -> tuple[int, torch.dtype]:
        """Number and type of the elements of a weight record."""
        if self.format is not None:
            return self.format.nbytes, torch.uint8
        return self.shape.numel, self.dtype

    @property
    def weight_bytes(self) -> int:
        numel, dtype = self.stored
        return round_up(numel * dtype.itemsize, ALIGN)

    @property
    def sections(self) -> tuple[Section, ...]:
        states = [("exp_avg", self.state_dtype), ("exp_avg_sq", self.state_dtype)]
        if self.dtype == torch.bfloat16:
            states.insert(0, ("low", torch.int16))
        sections, offset = [], 0
        for name, dtype in states:
            sections.append(Section(name, dtype, offset))
            # aligned to 64 bytes: sections share no cache line
            offset = round_up(offset + self.shape.numel * dtype.itemsize, 64)
        return tuple(sections)

    @property
    def state_bytes(self) -> int:
        last = self.sections[-1]
        return round_up(last.offset + self.shape.numel * last.dtype.itemsize, ALIGN)

    def weights(self, record: Tensor) -> Tensor:
        """The flat weights inside a record's bytes, as they are stored; a gradient has the same
        layout."""
        numel, dtype = self.stored
        return record[..., : numel * dtype.itemsize].view(dtype)

    def unpack(self, layer: int, stored: Tensor, out: Tensor) -> None:
        """Copies the flat weights of a record of a layer into `out` [numel]."""
        if self.format is None:
            out.copy_(stored)
        else:
            self.format.of_layer(layer).unpack(stored, out)

    def state(self, record: Tensor, name: str) -> Tensor:
        """One optimizer state inside a state record's bytes."""
        for section in self.sections:
            if section.name == name:
                end = section.offset + self.shape.numel * section.dtype.itemsize
                return record[section.offset : end].view(section.dtype)
        raise KeyError(name)
