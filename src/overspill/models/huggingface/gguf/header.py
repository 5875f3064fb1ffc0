"""The header of a GGUF file: metadata, and the type, shape and place of each tensor. No torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.core.errors import CheckpointError

_AGAIN = "download it again"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4

TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
"""Name, and weights and bytes of a block, of each type by its number."""
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """Type, shape and place of a tensor."""

    name: str
    type: str
    shape: tuple[int, ...]
    """Shape as in torch: the last dimension is contiguous."""
    file: Path
    begin: int
    """Position of the first byte in the file."""
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """Metadata of a model and the tensors of all its files."""

    path: Path
    """Path of the first file."""
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """Name of the model family in llama.cpp."""
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number in the architecture's own metadata, or `default`. Equal numbers for all
        layers count as one."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise CheckpointError(
                f"{self.path}: {key} in its metadata is {str(value)[:60]!r}, not a number; "
                f"{_AGAIN}, or put the config.json of the original model into its folder"
            )
        return default if value is None else value

    @property
    def n_layers(self) -> int:
        """Number of blocks of the model, without blocks that predict further tokens."""
        return int(self.get("block_count", 0)) - int(self.get("nextn_predict_layers", 0))


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def first_file(path: Path) -> Path:
    """Return the first file of a model; `path` is any of its files."""
    split = _SPLIT.fullmatch(path.name)
    return path if split is None else path.with_name(_part(split, 1))


def all_files(name: str) -> list[str]:
    """Return the names of all files of a model; `name` is the name of any of them."""
    split = _SPLIT.fullmatch(name)
    if split is None:
        return [name]
    return [_part(split, number) for number in range(1, int(split["count"]) + 1)]


def read_header(path: Path) -> GgufHeader:
    """Return the header of a model in one or several files; `path` is any of them. Raises if one is
    missing, truncated, or not a GGUF file."""
    files = _files(path)
    return _read(files, tuple(_stamp(file) for file in files))


def _files(path: Path) -> tuple[Path, ...]:
    """Return all files of a model, which must exist."""
    files = tuple(path.with_name(name) for name in all_files(path.name))
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing, one of the {len(files)} files of this model; download it into "
                "the same folder"
            )
    return files


def _part(split: re.Match[str], number: int) -> str:
    return f"{split['stem']}-{number:05d}-of-{split['count']}.gguf"


def _stamp(file: Path) -> tuple[int, int]:
    """Return a value that changes with the content of the file."""
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=2)  # a command reads it several times, a vocabulary takes 0.3 s
def _read(files: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> GgufHeader:
    metadata: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, file in enumerate(files):
        own, found = _read_file(file)
        count = own.get("split.count", 1)
        if count not in (0, len(files)) or own.get("split.no", number) != number:
            raise CheckpointError(
                f"{file} is part {own.get('split.no', 0) + 1} of {count} files, and is named as "
                f"one of {len(files)}; give the files their original names "
                f"(NAME-00001-of-{count:05d}.gguf and so on)"
            )
        if twice := found.keys() & tensors.keys():
            raise CheckpointError(f"{file} contains {min(twice)} again; {_AGAIN}")
        metadata = metadata or own
        tensors |= found
    return GgufHeader(files[0], files, metadata, tensors)


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return metadata and tensors of one file."""
    try:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Parser(file, data).parse()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{file} is corrupt or truncated: its header cannot be read; {_AGAIN}"
        ) from error


class _Parser:
    """Reader of values one behind the other."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at = file, data, 0

    def parse(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        if self._data[:4] != b"GGUF":
            raise self._wrong("is not a GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            kind = "is big-endian" if swapped else f"has version {version} of GGUF"
            raise self._wrong(f"{kind}; versions 2 and 3 are supported, little-endian")
        n_tensors, n_values = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._wrong(f"has the alignment {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors = {entry[0]: self._place(*entry, begin) for entry in entries}
        if len(tensors) != n_tensors:
            raise self._wrong("contains a tensor twice")
        end = max((tensor.begin + tensor.nbytes for tensor in tensors.values()), default=0)
        if end > len(self._data):
            raise self._wrong(f"is truncated: {len(self._data)} bytes instead of {end}")
        return metadata, tensors

    def _place(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, begin: int
    ) -> StoredTensor:
        if number not in TYPES:
            raise CheckpointError(
                f"{self._file}: {name} has type {number}, which Overspill does not know; give a "
                "file with another quantization, such as Q4_K_M"
            )
        kind, weights, nbytes = TYPES[number]
        if not shape or min(shape) < 1 or shape[-1] % weights:
            raise self._wrong(f"gives {name} ({kind}) the shape {list(shape)}")
        row_bytes = shape[-1] // weights * nbytes
        return StoredTensor(name, kind, shape, self._file, begin + offset, row_bytes)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type and offset of a tensor."""
        name, n_dimensions = self._string(), self._scalar("I")
        if n_dimensions > _MOST_DIMENSIONS:
            raise self._wrong(f"gives {name[:80]} {n_dimensions} dimensions")
        sizes = [self._scalar("Q") for _ in range(n_dimensions)]
        return name, tuple(reversed(sizes)), self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 1:
            raise ValueError(f"unknown type {kind}")
        of, count = self._scalar("I"), self._scalar("Q")
        if of == _STRING:
            return self._strings(count)
        if of == _ARRAY:
            return [self._value(of, depth + 1) for _ in range(count)]
        code = f"<{count}{_SCALARS[of]}"
        values = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return list(values)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Return `count` strings, of which there may be half a million."""
        data, at, unpack = self._data, self._at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            (length,) = unpack(data, at)
            at += 8 + length
            found.append(data[at - length : at].decode("utf-8"))
        if at > len(data):
            raise ValueError("string is longer than the file")
        self._at = at
        return found

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file} {what}; {_AGAIN}")
