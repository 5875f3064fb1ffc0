"""A checkpoint folder of Hugging Face: finds it, checks it, reads its tensors by name."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.json_text import parse_json
from overspill.tiers.safetensors_stream import StreamReader, TensorSpec
from overspill.tiers.ssd import BounceBuffers

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin")
_CONVERT = (
    'python -c "from transformers import {model} as M; '
    "M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
)


def find_folder(path_or_repo: str | os.PathLike[str]) -> Path:
    """The local folder of a checkpoint; a repository of the hub is downloaded, unless cached."""
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_repo)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(
            f"{name} does not exist; give the folder of a checkpoint or a repository like "
            "mistralai/Mixtral-8x7B-v0.1"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
            )
        )
    except Exception as error:  # no network, no such repository, no access
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name} is neither a folder nor a repository that can be downloaded ({reason})"
        ) from error


def read_config(folder: Path) -> Any:
    """The model's config. Raises if the weights are quantized."""
    from transformers import AutoConfig

    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG}: it is not a Hugging Face checkpoint; give the folder that "
            "holds config.json and the .safetensors files"
        )
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # an unknown model_type, or invalid JSON
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder / CONFIG} cannot be used: {reason}") from error
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        kind = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"{folder} is quantized ({kind}); Overspill needs the unquantized checkpoint in "
            "bf16, fp16 or fp32"
        )
    return config


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_inside(file: object) -> bool:
    """Whether `file` is the name of a file in a folder, and leads nowhere else."""
    if not isinstance(file, str) or not file.isprintable():
        return False
    path = Path(file)
    return path.parts != () and ".." not in path.parts and not path.is_absolute()


@contextmanager
def silence() -> Iterator[None]:
    """Suppresses warnings and progress bars of transformers."""
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


class CheckpointFolder:
    """The tensors of all shards. Every shard is checked before the first tensor is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[str, StreamReader] = {}
        self.specs: dict[str, TensorSpec] = {}
        self._home: dict[str, StreamReader] = {}
        try:
            self._open()
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
                self.specs[name], self._home[name] = spec, reader
        for name in index or ():
            if name not in self.specs:
                raise CheckpointError(
                    f"{self.folder / INDEX} names {name}, which {index and index[name]} does not "
                    "contain; download them again"
                )

    def _index(self) -> Mapping[str, str] | None:
        """Tensor → file, or None if there is only one file."""
        if (self.folder / INDEX).is_file():
            return self._weight_map()
        if (self.folder / SINGLE).is_file():
            return None
        if any((self.folder / name).exists() for name in _PICKLES):
            command = _CONVERT.format(folder=self.folder, model=self._architecture())
            raise CheckpointError(
                f"{self.folder} has pickled weights (.bin), which can run any code; Overspill "
                f"reads safetensors only. If you trust it, convert it with: {command}"
            )
        raise CheckpointError(
            f"{self.folder} has neither {SINGLE} nor {INDEX}; download its weights"
        )

    def _weight_map(self) -> Mapping[str, str]:
        """The index, whose values must be names of files in this folder."""
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

    def _architecture(self) -> str:
        """The class that the config names; it may be an encoder-decoder."""
        named = parse_json((self.folder / CONFIG).read_bytes()).get("architectures")
        return str(named[0]) if named else "AutoModelForCausalLM"

    def read(self, name: str, offset: int, out: Tensor) -> None:
        """Fills `out`, in its dtype, with the elements of tensor `name` from `offset` on."""
        reader, dtype = self._home[name], self.specs[name].dtype
        if out.dtype == dtype and out.is_contiguous() and not out.is_cuda:
            reader.read_piece(name, offset, out)
            return
        piece = torch.empty(out.shape, dtype=dtype)
        reader.read_piece(name, offset, piece)
        out.copy_(piece)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
