"""Weights of a GGUF file, read some rows at a time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from overspill.compute.gguf_blocks import SCHEMES, take_apart
from overspill.compute.packed_matrix import BadPart, PackedMatrix, Parts
from overspill.compute.record_format import stored_parts
from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.packing import Kind, Scheme
from overspill.models.huggingface.gguf.header import FLOATS, StoredTensor
from overspill.models.huggingface.packed.tensor import PackedTensor, Read
from overspill.tiers.safetensors_stream import StreamReader, TensorSpec
from overspill.tiers.ssd import BounceBuffers

_CHUNK = 1 << 20
"""Number of weights that are unpacked at once."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = Scheme(Kind.BLOCKS, (1, None))
_ADVICE = "download it again"

Views = Callable[[Tensor], list[Tensor]]
"""Function that returns the views of a plain matrix that consecutive stored rows fill, one for each
source."""


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a stored tensor."""

    stored: StoredTensor
    begin: int
    rows: int
    columns: int = 0
    """Number of columns; 0: as in the stored tensor."""

    @staticmethod
    def all_of(stored: StoredTensor) -> "Rows":
        """Return all rows of a stored tensor. A tensor of one dimension has rows of one column."""
        n_rows = stored.nbytes // stored.row_bytes
        if len(stored.shape) == 1 and stored.type in FLOATS:
            return Rows(stored, 0, stored.shape[0], columns=1)
        return Rows(stored, 0, n_rows)

    @property
    def n_columns(self) -> int:
        return self.columns or self.stored.shape[-1]

    @property
    def row_elements(self) -> int:
        """Number of elements of a row in the stored type: bytes, unless it is a floating-point
        type."""
        return self.n_columns if self.stored.type in FLOATS else self.stored.row_bytes


@dataclass(frozen=True)
class GgufTensor(PackedTensor):
    """Tensor of a checkpoint of Hugging Face whose values are stored in rows of a GGUF file."""

    sources: tuple[Rows, ...] = ()
    views: Views = field(default=lambda out: [out])
    plain_shape: tuple[int, ...] = ()

    @staticmethod
    def of(
        name: str,
        sources: tuple[Rows, ...],
        shape: tuple[int, ...],
        views: Views = lambda out: [out],
        stack: int | None = None,
        transposed: bool = False,
    ) -> "GgufTensor":
        """Make a tensor from stored rows. `shape` is the shape of one matrix of `stack`;
        `transposed` is for experts of gpt-oss."""
        kinds, rows = {source.stored.type for source in sources}, sum(s.rows for s in sources)
        columns, kind = sources[0].n_columns, next(iter(kinds))
        scheme = SCHEMES.get(kind, _BLOCKS) if len(kinds) == 1 else _BLOCKS
        if transposed and scheme.kind is Kind.E2M1:
            scheme = Scheme(Kind.MXFP4_STACK, (1, 32))
        matrix = PackedMatrix(scheme, rows, columns, transposed=transposed)
        fields = ("codes", "more codes")
        parts = dict(zip(fields, (source.stored.name for source in sources), strict=False))
        stacked = () if stack is None else (stack,)
        return GgufTensor(name, matrix, stacked, parts, sources, views, shape)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return self.plain_shape

    @property
    def kind(self) -> str:
        kinds = sorted({source.stored.type for source in self.sources})
        return f"type {' and '.join(kinds)}"

    @property
    def is_plain(self) -> bool:
        return all(source.stored.type in FLOATS for source in self.sources)

    @property
    def spec(self) -> TensorSpec:
        types = {source.stored.type for source in self.sources}
        dtype = _DTYPES[types.pop()] if self.is_plain and len(types) == 1 else torch.float32
        return TensorSpec(dtype, (*self.stack, *self.plain_shape))

    def place(self, name: str, spec: TensorSpec, number: int) -> tuple[int, tuple[int, ...]]:
        source = next(source for source in self.sources if source.stored.name == name)
        begin = (source.begin + number * source.rows) * source.row_elements
        return begin, (source.rows, source.row_elements)

    def parts_of(self, read: Callable[[str], Tensor]) -> Parts:
        """Return the parts of the matrices. Rows of gate and up of gpt-oss come in turn."""
        found = [
            stored_parts(take_apart(source.stored.type, read(source.stored.name)))
            for source in self.sources
        ]
        joined = {
            field: part
            if len(found) == 1
            else torch.stack([f[field] for f in found], 1).flatten(0, 1)
            for field, part in found[0].items()
        }
        if self.matrix.scheme.kind is Kind.MXFP4_STACK:
            joined["codes"] = joined["codes"].unflatten(1, (-1, 16))
        return Parts(**joined)

    def _bad(self, error: BadPart) -> CheckpointError:
        return _bad(self.sources[0].stored, error.reason)

    def read(self, read: Read, offset: int, out: Tensor) -> None:
        for number, part in self._matrices(offset, out):
            for source, view in zip(self.sources, self.views(part), strict=True):
                self._fill(source, read(source.stored.name, number), view)

    def _fill(self, source: Rows, stored: Tensor, out: Tensor) -> None:
        """Unpack rows into a view of as many weights, some of its first dimension at a time."""
        each = source.rows // len(out)
        step = max(1, _CHUNK // (each * source.n_columns))
        for begin in range(0, len(out), step):
            part = out[begin : begin + step]
            self._dequantize(source.stored, stored[begin * each : (begin + step) * each], part)

    def _dequantize(self, stored: StoredTensor, rows: Tensor, out: Tensor) -> None:
        """Fill `out`, a view of as many weights as `rows` have."""
        if stored.type in FLOATS:
            out.copy_(rows.view(out.shape))
            return
        if stored.type not in SCHEMES:
            out.copy_(self._with_gguf(stored, rows).view(out.shape))
            return
        parts = take_apart(stored.type, rows)
        matrix = PackedMatrix(SCHEMES[stored.type], len(rows), stored.shape[-1])
        try:
            matrix.check(parts)
        except BadPart as error:
            raise _bad(stored, error.reason) from error
        if out.is_contiguous():
            matrix.unpack(parts, out.view(matrix.shape))
            return
        values = torch.empty(matrix.shape, dtype=out.dtype)
        matrix.unpack(parts, values)
        out.copy_(values.view(out.shape))

    def _with_gguf(self, stored: StoredTensor, rows: Tensor) -> Tensor:
        """Unpack a type that only llama.cpp's own package knows."""
        import gguf

        kind = gguf.GGMLQuantizationType[stored.type]
        values = torch.from_numpy(gguf.dequantize(rows.numpy(), kind))
        if not values.isfinite().all():
            raise _bad(stored, "has scales that are infinite or NaN")
        return values


def _bad(stored: StoredTensor, reason: str) -> CheckpointError:
    return CheckpointError(f"{stored.file}: {stored.name} {reason}; {_ADVICE}")


def check_types(tensors: Iterable[StoredTensor]) -> None:
    """Raise if a tensor cannot be unpacked."""
    for kind, stored in {tensor.type: tensor for tensor in tensors}.items():
        if kind in FLOATS or kind in SCHEMES:
            continue
        try:
            import gguf

            block = np.zeros((1, stored.row_bytes), np.uint8)
            gguf.dequantize(block, gguf.GGMLQuantizationType[kind])
        except (ImportError, KeyError, NotImplementedError) as error:
            raise ConfigError(
                f"{stored.file}: {stored.name} has type {kind}, which needs the package gguf"
                + (
                    "; install it: pip install gguf"
                    if isinstance(error, ImportError)
                    else " in a newer version: pip install --upgrade gguf"
                )
            ) from error


class GgufReader(StreamReader):
    """Reader of slices of the tensors in one GGUF file. Packed tensors are bytes without a
    shape."""

    def __init__(
        self,
        path: Path,
        tensors: list[tuple[StoredTensor, str, tuple[int, ...] | None]],
        direct: BounceBuffers,
    ) -> None:
        """`tensors` has the names and shapes by which tensors are read; None for no shape."""
        self._tensors = tensors
        super().__init__(path, _ADVICE, direct)

    def _read_header(self) -> None:
        self.metadata, self.specs, self._begin = {}, {}, {}
        for stored, name, shape in self._tensors:
            dtype = _DTYPES.get(stored.type, torch.uint8)
            numel = stored.nbytes // dtype.itemsize
            self.specs[name] = TensorSpec(dtype, (numel,) if shape is None else shape)
            self._begin[name] = stored.begin
