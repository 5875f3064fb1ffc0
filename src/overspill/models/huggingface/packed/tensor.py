"""A packed weight: what a checkpoint stores of it, and its values."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.compute.formats import (
    E2M1,
    decode_e4m3,
    decode_e8m0,
    scale_groups,
    subtract_groups,
    unpack_awq,
    unpack_integers,
    unpack_nibbles,
)
from overspill.core.errors import CheckpointError
from overspill.models.huggingface.packed.config import Kind, Scheme
from overspill.tiers.safetensors_stream import TensorSpec

_CHUNK = 1 << 20
"""Weights that are unpacked at once: what is allocated for them stays small."""
_TRANSPOSED = (Kind.GPTQ, Kind.AWQ)
_ADD_ONE = {4: 0x11111111, 8: 0x01010101}

Read = Callable[[str, int], Tensor]
"""Reads a stored tensor, or only one of its `n` matrices: (name, matrix)."""


@dataclass(frozen=True)
class PackedTensor:
    """A matrix of codes and scales, or a stack of such matrices, by the names of its parts."""

    name: str
    """Of the plain tensor."""
    scheme: Scheme
    stack: tuple[int, ...]
    """Number of matrices if there is a dimension for it."""
    rows: int
    columns: int
    codes: str
    scales: str
    factor: str | None = None
    """Of all scales."""
    divides: bool = False
    """Scales are divided by the factor."""
    zeros: str | None = None
    indices: str | None = None
    """The group of each column."""
    size: str | None = None
    """Rows and columns."""

    @property
    def parts(self) -> Iterator[str]:
        """The names of all stored tensors."""
        named = self.codes, self.scales, self.factor, self.zeros, self.indices, self.size
        return (name for name in named if name is not None)

    @property
    def is_transposed(self) -> bool:
        """Whether the plain tensor has inputs as rows."""
        return self.scheme.kind is Kind.MXFP4_STACK

    @property
    def spec(self) -> TensorSpec:
        """Type and shape of the plain tensor: float32 holds the products exactly."""
        matrix = (self.columns, self.rows) if self.is_transposed else (self.rows, self.columns)
        return TensorSpec(torch.float32, (*self.stack, *matrix))

    def read(self, read: Read, offset: int, out: Tensor) -> None:
        """Fills `out` with whole matrices from element `offset` on."""
        each = self.rows * self.columns
        first, count = offset // each, out.numel() // each
        if (first * each, count * each) != (offset, out.numel()):
            raise ValueError(f"{self.name} is read in matrices of {each}, not {out.numel()}")
        for matrix, part in enumerate(out.view(count, *self.spec.shape[-2:]), first):
            self._unpack(read, matrix, part.T if self.is_transposed else part)

    def _unpack(self, read: Read, matrix: int, out: Tensor) -> None:
        self._check(read)
        codes, scales = read(self.codes, matrix), self._scales(read, matrix)
        zeros = None if self.zeros is None else self._zeros(read(self.zeros, matrix))
        row_block, group = self.scheme.block[0] or self.rows, self.scheme.block[1] or self.columns
        step = max(8, _CHUNK // self.columns // 8 * 8)  # AWQ has eight rows in each int32
        for begin in range(0, self.rows, step):
            rows = slice(begin, min(begin + step, self.rows))
            values = self._values(codes, rows)
            if zeros is not None:
                subtract_groups(values, zeros[rows], group)
            of_rows = torch.arange(rows.start, rows.stop) // row_block
            scale_groups(values, scales[of_rows], group)
            out[rows].copy_(values)

    def _values(self, codes: Tensor, rows: slice) -> Tensor:
        """The codes of some rows as numbers."""
        bits = self.scheme.bits
        match self.scheme.kind:
            case Kind.MXFP4_STACK:
                return unpack_nibbles(codes.view(self.rows, -1)[rows], E2M1)
            case Kind.E2M1:
                return unpack_nibbles(codes[rows].view(torch.uint8), E2M1)
            case Kind.E4M3:
                values = decode_e4m3(codes[rows])
                if values.sum().isnan():
                    raise self._wrong(f"{self.codes} has codes that are NaN")
                return values
            case Kind.INT8:
                return codes[rows].float()
            case Kind.INTEGERS:
                values = unpack_integers(codes[rows], bits)
                return values.sub_(1 << bits - 1) if self.zeros is None else values
            case Kind.GPTQ:
                return unpack_integers(codes[:, rows].T, bits)
            case Kind.AWQ:
                return unpack_awq(codes[:, rows.start // 8 : rows.stop // 8]).T.contiguous()

    def _scales(self, read: Read, matrix: int) -> Tensor:
        """A row for each block of rows, a column for each group of columns."""
        stored = read(self.scales, matrix)
        is_power = stored.dtype in (torch.uint8, torch.float8_e8m0fnu)
        scales = decode_e8m0(stored) if is_power else stored.float()
        if self.factor is not None:
            factor = read(self.factor, matrix).float()
            scales = scales / factor if self.divides else scales * factor
        if not scales.isfinite().all():
            raise self._wrong(f"{self.scales} has scales that are infinite or NaN")
        row_block, group = self.scheme.block
        shape = (
            -(-self.rows // (row_block or self.rows)),
            -(-self.columns // (group or self.columns)),
        )
        return scales.T if self.scheme.kind in _TRANSPOSED else scales.reshape(shape)

    def _zeros(self, stored: Tensor) -> Tensor:
        """The code that stands for zero of each row and group."""
        bits = self.scheme.bits
        match self.scheme.kind:
            case Kind.GPTQ:
                words = stored + _ADD_ONE[bits] if self.scheme.zero_offset else stored
                return unpack_integers(words, bits).T
            case Kind.AWQ:
                return unpack_awq(stored).T
            case Kind.INTEGERS if stored.dtype == torch.int32:
                return unpack_integers(stored.T, bits).T[: self.rows]
            case Kind.INTEGERS:
                return stored.float().view(self.rows, -1) + (1 << bits - 1)
        return stored.float().view(self.rows, -1)

    def _check(self, read: Read) -> None:
        """Raises if the parts that describe the others do not fit them."""
        if self.size is not None:
            size = read(self.size, 0).tolist()
            if size != [self.rows, self.columns]:
                raise self._wrong(
                    f"{self.size} is {size}, {self.codes} has {[self.rows, self.columns]}"
                )
        if self.indices is not None:
            group = self.scheme.block[1] or self.columns
            if not torch.equal(read(self.indices, 0).long(), torch.arange(self.columns) // group):
                raise self._wrong(
                    f"{self.indices} gives columns to groups in another order (act-order, "
                    "desc_act), which is not supported"
                )

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{what}; download the checkpoint again, or give the one in bf16 that it was made from"
        )
