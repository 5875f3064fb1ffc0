"""Checkpoint folders of Hugging Face: their config, and their tensors by name."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from overspill.compute.packed_matrix import Parts
from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.json_text import parse_json
from overspill.models.huggingface.checks import (
    CONFIG,
    INDEX,
    SINGLE,
    check_checkpoint,
    find_gguf,
    is_adapter,
    read_json_config,
    texts_of,
)
from overspill.models.huggingface.gguf.header import GgufHeader, read_header
from overspill.models.huggingface.gguf.names import translate
from overspill.models.huggingface.gguf.weights import GgufReader, check_types
from overspill.models.huggingface.packed.config import Packing, read_packing, without_packing
from overspill.models.huggingface.packed.find import find_packed, is_for_activations
from overspill.models.huggingface.packed.tensor import PackedTensor
from overspill.tiers.safetensors_stream import StreamReader, TensorSpec
from overspill.tiers.ssd import BounceBuffers

_log = logging.getLogger("overspill")


def read_config(folder: Path) -> Any:
    """Return the model's config, without the quantization of its weights. Raises if the weights
    cannot be read or there are no experts."""
    if is_adapter(folder):
        raise ConfigError(
            f"{folder} holds a LoRA adapter, not a whole model; overspill merge {folder} OUT makes "
            "a checkpoint of it and its base model; overspill.LLM, generate, chat and serve take "
            "it as it is"
        )
    check_checkpoint(folder)
    from transformers import AutoConfig

    texts = texts_of(folder)
    try:
        if (texts / CONFIG).is_file():
            config = AutoConfig.from_pretrained(texts)
        else:  # a GGUF file, whose metadata are enough
            config = AutoConfig.for_model(**read_json_config(folder))
        config.name_or_path = str(folder)
        return without_packing(config)
    except Exception as error:  # an unknown model_type, for example
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder / CONFIG} cannot be used: {reason}") from error


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_inside(file: object) -> bool:
    """Return whether `file` is the name of a file inside a folder."""
    if not isinstance(file, str) or not file.isprintable():
        return False
    path = Path(file)
    return path.parts != () and ".." not in path.parts and not path.is_absolute()


@contextmanager
def silence() -> Iterator[None]:
    """Context without warnings and progress bars of transformers."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _packing(folder: Path) -> Packing | None:
    """Return the packing of the weights of a checkpoint, whose config was checked before."""
    path = folder / CONFIG
    return read_packing(folder, parse_json(path.read_bytes())) if path.is_file() else None


class CheckpointFolder:
    """The tensors of all shards, or of a GGUF file under the names that they have in checkpoints of
    Hugging Face. Every file is checked before the first tensor is read.

    Packed weights appear as plain weights in float32, and are unpacked when they are read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[str, StreamReader] = {}
        self.specs: dict[str, TensorSpec] = {}
        self._reader_of: dict[str, StreamReader] = {}
        self.packed: dict[str, PackedTensor] = {}
        self.gguf = find_gguf(folder)
        try:
            if self.gguf is not None:
                self._open_gguf(read_header(self.gguf))
            else:
                self._open()
                self._find_packed()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        index, bounce = self._index(), BounceBuffers()  # the shards share them
        for file in sorted(set(index.values())) if index is not None else [SINGLE]:
            advice = "download it again"
            if not (self.folder / file).is_file():
                raise CheckpointError(f"{self.folder / file} is missing; {advice}")
            reader = StreamReader(self.folder / file, advice=advice, direct=bounce)
            self._readers[file] = reader
            for name, spec in reader.specs.items():
                self.specs[name], self._reader_of[name] = spec, reader
        for name in index or ():
            if name not in self.specs:
                raise CheckpointError(
                    f"{self.folder / INDEX} names {name}, which {index and index[name]} does not "
                    "contain; download them again"
                )

    def _open_gguf(self, header: GgufHeader) -> None:
        check_types(header.tensors.values())
        found, bounce = translate(header), BounceBuffers()
        for file in header.files:
            tensors = [
                (stored, *found.plain.get(stored.name, (stored.name, None)))
                for stored in header.tensors.values()
                if stored.file == file
            ]
            reader = self._readers[file.name] = GgufReader(file, tensors, bounce)
            self._reader_of |= dict.fromkeys(reader.specs, reader)
        for name, _ in found.plain.values():
            self.specs[name] = self._reader_of[name].specs[name]
        self.packed |= found.others
        self.specs |= {name: packed.spec for name, packed in self.packed.items()}

    def _find_packed(self) -> None:
        """Replace the parts of packed weights in `specs` by the weights."""
        packing = _packing(self.folder)
        self.packed = find_packed(self.folder, self.specs, packing)
        if packing is None:
            return
        unused = {part for packed in self.packed.values() for part in packed.parts.values()}
        unused |= {n for n, spec in self.specs.items() if is_for_activations(n, spec)}
        self.specs = {n: spec for n, spec in self.specs.items() if n not in unused}
        self.specs |= {name: packed.spec for name, packed in self.packed.items()}
        if packing.activations:
            _log.warning(
                "%s quantizes activations too (%s); Overspill does not, which is more exact",
                self.folder,
                packing.method,
            )

    def _index(self) -> Mapping[str, str] | None:
        """Return the file of each tensor, or None if there is only one file."""
        return self._weight_map() if (self.folder / INDEX).is_file() else None

    def _weight_map(self) -> Mapping[str, str]:
        """Return the index, whose values must be names of files in this folder."""
        path = self.folder / INDEX
        try:
            found = parse_json(path.read_bytes())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is no JSON object with a weight_map; download it again"
            ) from error
        if not isinstance(found, dict) or not found:
            raise CheckpointError(
                f"{path}: weight_map is {_short(found)}, it must map names of tensors to names of "
                "files; download it again"
            )
        for name, file in found.items():
            if not _is_inside(file):
                raise CheckpointError(
                    f"{path}: weight_map gives {_short(name)} the file {_short(file)}, which is "
                    "not the name of a file in this folder; correct it or download it again"
                )
        return found

    @property
    def files(self) -> list[Path]:
        """Files of all tensors."""
        return [reader.path for reader in self._readers.values()]

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor; for a packed tensor, the file of its codes."""
        packed = self.packed.get(name)
        return self._reader_of[name if packed is None else packed.parts["codes"]].path

    def plain_file(self, file: Path) -> Path:
        """Return the name of the plain safetensors file for the tensors of one of the files."""
        if self.gguf is None:
            return file.relative_to(self.folder)
        count = len(self._readers)
        number = 1 + self.files.index(file)
        return Path(SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors")

    def stored_bytes(self, stored: Iterable[str]) -> int:
        """Return the size in bytes of stored tensors, by their names in the files."""
        return sum(self._reader_of[name].specs[name].nbytes for name in stored)

    def plain_dtype(self, config: Any) -> torch.dtype:
        """Return the dtype of the weights before they were packed; `config` is the model's
        config."""
        if isinstance(config.dtype, torch.dtype):
            return config.dtype
        if self.gguf is not None:  # whose norms are in float32
            return torch.bfloat16
        plain = (spec.dtype for name, spec in self.specs.items() if name not in self.packed)
        return next((dtype for dtype in plain if dtype.is_floating_point), torch.bfloat16)

    def read(self, name: str, offset: int, out: Tensor) -> None:
        """Fill `out`, in its dtype, with the elements of tensor `name` from `offset` on; a packed
        tensor is read in whole matrices."""
        if name in self.packed:
            if out.is_contiguous() and not out.is_cuda:
                self._unpack(self.packed[name], offset, out)
            else:
                plain = torch.empty(out.shape, dtype=out.dtype)
                self._unpack(self.packed[name], offset, plain)
                out.copy_(plain)
            return
        reader, dtype = self._reader_of[name], self.specs[name].dtype
        if out.dtype == dtype and out.is_contiguous() and not out.is_cuda:
            reader.read_piece(name, offset, out)
            return
        piece = torch.empty(out.shape, dtype=dtype)
        reader.read_piece(name, offset, piece)
        out.copy_(piece)

    def read_whole(self, name: str) -> Tensor:
        """Return tensor `name` in the dtype of its spec."""
        spec = self.specs[name]
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        self.read(name, 0, whole)
        return whole

    def _unpack(self, packed: PackedTensor, offset: int, out: Tensor) -> None:
        packed.read(partial(self._read_part, packed), offset, out)

    def read_parts(self, name: str, number: int, read: bool = True) -> Parts:
        """Return the parts of one matrix of a packed tensor; without `read` on the meta device."""
        packed = self.packed[name]
        if read:
            return packed.read_parts(partial(self._read_part, packed), number)
        specs = {part: self._reader_of[part].specs[part] for part in packed.parts.values()}
        return packed.parts_of(
            lambda part: torch.empty(
                packed.place(part, specs[part], 0)[1], dtype=specs[part].dtype, device="meta"
            )
        )

    def _read_part(self, packed: PackedTensor, name: str, number: int) -> Tensor:
        reader = self._reader_of[name]
        spec = reader.specs[name]
        begin, shape = packed.place(name, spec, number)
        part = torch.empty(shape, dtype=spec.dtype)
        reader.read_piece(name, begin, part)
        return part

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
