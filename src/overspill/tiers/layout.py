"""The layout of an expert's records: its weights in one flat buffer, its optimizer states in
another. Sizes are multiples of ALIGN, as direct I/O requires."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from overspill.core.experts import ExpertShape
from overspill.core.sizes import round_up

ALIGN = 4096
_LINE = 64
"""Low-rank matrices begin at a multiple of so many bytes."""
_RANK_STEP = 8
"""Elements that grouped kernels load at once: ranks are filled up with zeros to a multiple."""


@dataclass(frozen=True)
class Section:
    """One optimizer state of an expert inside its state record."""

    name: str
    dtype: torch.dtype
    offset: int


class LowRanks(NamedTuple):
    """Ranks of the low-rank matrices that follow the weights in each record; 0: there are none."""

    w_in: int = 0
    w_out: int = 0


NO_LOW_RANKS = LowRanks()


class LowRankPlanes(NamedTuple):
    """The low-rank part of one matrix in a record, B @ A: A [padded, inputs] and B
    [outputs, padded]. Positions count elements of the dtype of computation."""

    a: int
    b: int
    inputs: int
    outputs: int
    rank: int
    padded: int
    """The rank, filled up with zeros."""

    def of(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """A [n, padded, inputs] and B [n, outputs, padded] of records [n, ...] in their dtype."""
        a = records[:, self.a : self.a + self.padded * self.inputs]
        b = records[:, self.b : self.end]
        return a.unflatten(1, (self.padded, -1)), b.unflatten(1, (-1, self.padded))

    @property
    def end(self) -> int:
        return self.b + self.outputs * self.padded


class WeightFormat(Protocol):
    """Packed form of the weights in the records of all experts, which may differ by layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of the largest."""

    def of_layer(self, layer: int) -> "LayerFormat": ...


class LayerFormat(Protocol):
    """Packed form of the weights in the records of a layer's experts."""

    @property
    def nbytes(self) -> int: ...

    def unpack(self, record: Tensor, out: Tensor) -> None:
        """Fill the flat weights `out`, in their dtype, from the bytes of a record."""

    def unpack_several(
        self, records: Tensor, out: Tensor, counts: Sequence[int], ends: Tensor
    ) -> None:
        """Fill the flat weights `out` [n, numel] from the bytes of records [n, nbytes]. `counts`
        are the token rows of each expert, and `ends` the same on the device, cumulated: experts
        without rows may be left out."""


@dataclass(frozen=True)
class RecordLayout:
    """Sizes and views of an expert's weight record and state record.

    With bf16 weights the fp32 master is the weight plus its 16 low bits (`low`), so weights,
    master and both moments take 12 bytes per parameter, as with fp32 weights. Packed weights are
    bytes, of which `dtype` is computed; they have no states, and their size may differ by layer.
    Low-rank matrices (an adapter whose scale is in B) may follow the weights; experts that have
    some are not trained.
    """

    shape: ExpertShape
    dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32
    format: WeightFormat | None = None
    ranks: LowRanks = NO_LOW_RANKS

    @property
    def bare(self) -> tuple[int, torch.dtype]:
        """Number and type of the elements of the weights alone."""
        if self.format is not None:
            return self.format.nbytes, torch.uint8
        return self.shape.numel, self.dtype

    @property
    def stored(self) -> tuple[int, torch.dtype]:
        """Number and type of the elements of a weight record; of the largest, if their sizes differ
        by layer."""
        numel, dtype = self.bare
        if any(self.ranks):
            end = max(planes.end for planes in self.low_rank if planes is not None)
            numel = round_up(end * self.dtype.itemsize, _LINE) // dtype.itemsize
        return numel, dtype

    def stored_in(self, layer: int) -> tuple[int, torch.dtype]:
        """Number and type of the elements of the weight records of a layer."""
        # kernels find low-rank matrices at the same place in the records of all layers
        if self.format is None or any(self.ranks):
            return self.stored
        return self.format.of_layer(layer).nbytes, torch.uint8

    @functools.cached_property
    def low_rank(self) -> tuple[LowRankPlanes | None, LowRankPlanes | None]:
        """The low-rank parts of w_in and w_out."""
        shape, line = self.shape, _LINE // self.dtype.itemsize
        numel, dtype = self.bare
        at = -(-numel * dtype.itemsize // self.dtype.itemsize)
        found: list[LowRankPlanes | None] = []
        sizes = (shape.d_model, shape.in_rows), (shape.d_hidden, shape.d_model)
        for rank, (inputs, outputs) in zip(self.ranks, sizes, strict=True):
            if not rank:
                found.append(None)
                continue
            padded = round_up(rank, _RANK_STEP)
            a = round_up(at, line)
            b = round_up(a + padded * inputs, line)
            planes = LowRankPlanes(a, b, inputs, outputs, rank, padded)
            found.append(planes)
            at = planes.end
        return found[0], found[1]

    def computed(self, records: Tensor) -> Tensor:
        """Stored records in the dtype of computation, as their low-rank matrices are."""
        return records if records.dtype == self.dtype else records.view(self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight record; of the largest, if their sizes differ by layer."""
        return _whole_pages(*self.stored)

    def weight_bytes_in(self, layer: int) -> int:
        """Bytes of the weight records of a layer."""
        return _whole_pages(*self.stored_in(layer))

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

    def weights(self, record: Tensor, layer: int | None = None) -> Tensor:
        """The flat weights inside the bytes of a layer's record, as they are stored; without a
        layer, of the largest. A gradient has the same layout."""
        numel, dtype = self.stored if layer is None else self.stored_in(layer)
        return record[..., : numel * dtype.itemsize].view(dtype)

    def unpack(self, layer: int, stored: Tensor, out: Tensor) -> None:
        """Copy the flat weights of a record of a layer into `out` [numel], the sums with their
        low-rank parts."""
        if self.format is None:
            out.copy_(stored[: self.shape.numel])
        else:
            self.format.of_layer(layer).unpack(stored, out)
        records, starts = self.computed(stored)[None], self.shape.starts
        for planes, size, start in zip(self.low_rank, self.shape.sizes, starts, strict=False):
            if planes is None:
                continue
            wide = torch.promote_types(out.dtype, torch.float32)
            a, b = (part[0].to(wide) for part in planes.of(records))
            weight = out[start : start + math.prod(size)].view(size)
            product = (b @ a).to(out.device)
            weight.copy_(weight.to(wide) + (product.T if self.shape.transposed else product))

    def state(self, record: Tensor, name: str) -> Tensor:
        """One optimizer state inside a state record's bytes."""
        for section in self.sections:
            if section.name == name:
                end = section.offset + self.shape.numel * section.dtype.itemsize
                return record[section.offset : end].view(section.dtype)
        raise KeyError(name)


def _whole_pages(numel: int, dtype: torch.dtype) -> int:
    return round_up(numel * dtype.itemsize, ALIGN)
