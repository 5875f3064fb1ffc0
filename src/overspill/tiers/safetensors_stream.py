"""Writes, reads and changes safetensors files in pieces: no tensor has to be in memory as a whole.

Format: the length of the header as 8 bytes, little-endian; the header as JSON (name → dtype, shape,
begin and end in the data); the data. https://github.com/huggingface/safetensors
"""

import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from overspill.core.errors import CheckpointError, DiskError
from overspill.core.json_text import parse_json
from overspill.core.sizes import format_size, round_up
from overspill.tiers.ssd import DIRECT_FROM, BounceBuffers, DirectFile, reserve

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_MAX_HEADER = 100 * 2**20  # the limit of the safetensors library


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of one tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class StreamWriter:
    """Writes a safetensors file. All tensors are declared first and then written in any order, by
    any number of threads. Several processes may write parts of one file: with `shared` it was made
    by a `StreamWriter` of one of them before, and `close` does not know whether it is complete."""

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, str] | None = None,
        shared: bool = False,
    ) -> None:
        self.path = path
        self._specs = dict(specs)
        self._missing = {name: spec.numel for name, spec in specs.items()}
        self._shared = shared
        self._lock = threading.Lock()
        header, self._begin, size = _layout(self._specs, metadata or {})
        if shared:
            self._fd = os.open(path, os.O_WRONLY)
            return
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            reserve(self._fd, size)
            _pwrite(self._fd, memoryview(header), 0)
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise _disk_error(path, size, error) from error
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the whole tensor `name`."""
        if tuple(tensor.shape) != self._specs[name].shape:
            raise ValueError(f"{name}: {tuple(tensor.shape)} is not {self._specs[name].shape}")
        self.write_piece(name, 0, tensor)

    def write_piece(self, name: str, offset: int, tensor: torch.Tensor) -> None:
        """Write `tensor` to the elements of tensor `name` from `offset` on; each element once."""
        spec = self._specs[name]
        if tensor.dtype != spec.dtype or not 0 <= offset <= spec.numel - tensor.numel():
            raise ValueError(
                f"{name} is {spec.numel} elements of {spec.dtype}; a piece of {tensor.numel()} of "
                f"{tensor.dtype} does not fit at {offset}"
            )
        with self._lock:
            self._missing[name] -= tensor.numel()
        at = self._begin[name] + offset * spec.dtype.itemsize
        try:
            _pwrite(self._fd, _bytes_of(tensor.detach().cpu().contiguous()), at)
        except OSError as error:
            raise _disk_error(self.path, tensor.nbytes, error) from error

    @property
    def unwritten(self) -> int:
        """Elements that were not written."""
        return sum(self._missing.values())

    def close(self) -> None:
        """Sync the file to the disk. Raises ValueError if an element was not written."""
        try:
            unwritten = [name for name, left in self._missing.items() if left != 0]
            if unwritten and not self._shared:
                raise ValueError(f"{self.path}: {unwritten[0]} is not completely written")
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise _disk_error(self.path, 0, error) from error
        finally:
            os.close(self._fd)

    def abandon(self) -> None:
        """Close an incomplete file after a failure."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class StreamReader:
    """Reads slices of a safetensors file, from any number of threads.

    `advice` ends the error message for a corrupt file. With `direct`, large pieces are read through
    these buffers without the page cache if the file system allows it, which is faster and evicts
    nothing from the cache.
    """

    def __init__(
        self,
        path: Path,
        advice: str = "resume from another checkpoint",
        direct: BounceBuffers | None = None,
    ) -> None:
        self.path = path
        self.advice = advice
        self._direct: DirectFile | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            message = f"{path} cannot be opened ({error.strerror}); {advice}"
            raise CheckpointError(message) from error
        try:
            self._read_header()
        except BaseException:
            os.close(self._fd)
            raise
        if direct is not None:
            self._direct = DirectFile.open(path, direct)

    def _read_header(self) -> None:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise self._corrupt(f"its {size} bytes do not begin with a safetensors header")
        try:
            header = parse_json(_pread(self._fd, length, 8))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.specs: dict[str, TensorSpec] = {}
            self._begin: dict[str, int] = {}
            end = 0
            for name, entry in header.items():
                if entry["dtype"] not in _TORCH_DTYPES:
                    raise self._corrupt(f"{name} is {entry['dtype']}, which is not supported")
                spec = TensorSpec(_TORCH_DTYPES[entry["dtype"]], tuple(entry["shape"]))
                begin, stop = entry["data_offsets"]
                if stop - begin != spec.nbytes or begin < 0:
                    raise self._corrupt(f"the header gives {name} {stop - begin} bytes")
                self.specs[name], self._begin[name] = spec, 8 + length + begin
                end = max(end, stop)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise self._corrupt("its header is not readable") from error
        if size != 8 + length + end:
            kind = "is truncated" if size < 8 + length + end else "has extra bytes"
            raise self._corrupt(f"it {kind}: {size} bytes instead of {8 + length + end}")

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor `name`."""
        out = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype)
        self.read_piece(name, 0, out)
        return out

    def read_piece(self, name: str, offset: int, out: torch.Tensor) -> None:
        """Fill the contiguous CPU tensor `out` from element `offset` of tensor `name` on."""
        spec = self.specs[name]
        if out.dtype != spec.dtype or not 0 <= offset <= spec.numel - out.numel():
            raise ValueError(f"{name} is {spec}; it has no {out.numel()} {out.dtype} at {offset}")
        at = self._begin[name] + offset * spec.dtype.itemsize
        view, done = _bytes_of(out), 0
        while done < len(view):
            try:
                if self._direct is not None and len(view) >= DIRECT_FROM:
                    count = self._direct.read(view[done:], at + done)
                else:
                    count = os.preadv(self._fd, [view[done:]], at + done)
            except OSError as error:
                raise self._corrupt(f"reading {name} failed: {error.strerror}") from error
            if count == 0:
                raise self._corrupt(f"it ends inside {name}")
            done += count

    def overwrite(self, fd: int, name: str, tensor: torch.Tensor) -> None:
        """Write tensor `name` through another descriptor of the file."""
        spec = self.specs[name]
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise ValueError(f"{name} is {spec}, not {tuple(tensor.shape)} of {tensor.dtype}")
        _pwrite(fd, _bytes_of(tensor.contiguous()), self._begin[name])

    def close(self) -> None:
        os.close(self._fd)
        if self._direct is not None:
            self._direct.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is corrupt: {what}; {self.advice}")


def replace_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Overwrite tensors of a file, one after another, by others of their types and shapes."""
    with StreamReader(path) as reader:
        fd = os.open(path, os.O_WRONLY)
        try:
            for name, tensor in tensors:
                reader.overwrite(fd, name, tensor)
        finally:
            os.close(fd)


def _layout(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The bytes of the header, the offset of each tensor in the file, and the size of the file."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    # widest elements first, as in the safetensors library: this aligns every tensor
    for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
        spec = specs[name]
        offsets[name] = end
        header[name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(round_up(len(text), 8))
    begin = 8 + len(text)
    start_of = {name: begin + offset for name, offset in offsets.items()}
    return len(text).to_bytes(8, "little") + text, start_of, begin + end


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _pwrite(fd: int, view: memoryview, at: int) -> None:
    done = 0
    while done < len(view):  # one call writes at most 2 GiB
        done += os.pwrite(fd, view[done:], at + done)


def _pread(fd: int, length: int, at: int) -> bytes:
    parts = []
    while length > 0 and (part := os.pread(fd, length, at)):
        parts.append(part)
        length, at = length - len(part), at + len(part)
    return b"".join(parts)


def _disk_error(path: Path, size: int, error: OSError) -> DiskError:
    return DiskError(
        f"{path}: writing {format_size(size)} failed ({error.strerror}); free some space or give "
        "another --out; earlier checkpoints are not affected"
    )
