"""Exports the newest checkpoint of a run to Hugging Face format, tensor by tensor, and quantizes it
or another checkpoint."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.config import GPTConfig
from overspill.models.huggingface.checks import INDEX, SINGLE, find_folder
from overspill.models.huggingface.find_experts import find_experts
from overspill.models.huggingface.folder import CheckpointFolder, read_config
from overspill.models.huggingface.from_gpt import (
    Piece,
    exported_config,
    exported_tensors,
    is_mixtral,
)
from overspill.models.huggingface.merge import copy_texts
from overspill.models.huggingface.packed.export import QuantizedFiles
from overspill.models.huggingface.packed.quantized import check_quantization
from overspill.models.huggingface.packed.tensor import PackedTensor
from overspill.models.huggingface.pregate_file import FILE as PREGATES
from overspill.models.huggingface.recipes import Recipes, Tensors
from overspill.models.huggingface.skeleton import meta_model
from overspill.tiers.aside import check_new, new_folder
from overspill.tiers.safetensors_stream import StreamReader, StreamWriter, TensorSpec
from overspill.train import checkpoint
from overspill.train.export_tokenizer import TokenizerFiles, tokenizer_files
from overspill.train.run_folder import is_run
from overspill.train.trained import find_checkpoint, find_model, find_shape

_SHARD_BYTES = 5 * 10**9  # as save_pretrained does
_PIECE_BYTES = 256 * 2**20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Exported:
    """Summary of an export."""

    out: str
    model_type: str
    checkpoint: str
    step: int | None
    """Step of the exported checkpoint; None if a checkpoint of Hugging Face was quantized."""
    parameters: int
    bytes: int
    """Size of the weights."""
    quantize: str | None = None


def export(
    model: str | os.PathLike[str],
    out: Path,
    tokenizer: str | None = None,
    shard_bytes: int = _SHARD_BYTES,
    progress: Progress = lambda what, done, total: None,
    quantize: str | None = None,
) -> Exported:
    """Writes the newest checkpoint of a run to the new folder `out`, for `from_pretrained`: as a
    Mixtral if that computes the same, else as a `GPTMoEForCausalLM` (see `from_gpt`).

    `tokenizer` replaces that of the run, for example if it was moved. `quantize` ("mxfp4", "int4"
    or "fp8") packs the experts; then `model` may also be a checkpoint of Hugging Face.
    """
    check_new(out)
    run = Path(model).expanduser()
    if quantize is not None:
        check_quantization(quantize)
        run = find_model(run)
        if not is_run(run):
            if tokenizer is not None:
                raise ConfigError(f"--tokenizer is for runs, {model} has its own; leave it out")
            return _export_checkpoint(run if run.is_dir() else model, out, quantize, progress)
    elif any((run / file).is_file() for file in (SINGLE, INDEX)):
        raise ConfigError(
            f"MODEL {model} is a checkpoint of Hugging Face already; --quantize int4 (or mxfp4, "
            "fp8) packs its experts"
        )
    config, path = find_checkpoint(run)
    state = checkpoint.read_state(path)
    shape = find_shape(config, state, path)
    files = tokenizer_files(tokenizer or config.data.tokenizer, shape)
    tensors = exported_tensors(shape)
    with StreamReader(path / "model.safetensors") as reader:
        specs = _specs(reader, tensors)
        with new_folder(out) as folder:
            _write_texts(folder, shape, str(state.facts["dtype"]), files)
            size = sum(spec.nbytes for spec in specs.values())
            if quantize is None:
                _write_weights(folder, reader, tensors, specs, shard_bytes, progress)
            else:
                source = _RunTensors(path, reader, tensors, specs)
                config = AutoConfig.from_pretrained(folder)
                size = _write_quantized(folder, source, config, quantize, shard_bytes, progress)
    return Exported(
        out=str(out),
        model_type="mixtral" if is_mixtral(shape) else "overspill_gpt",
        checkpoint=str(path),
        step=state.step,
        parameters=shape.total_params,
        bytes=size,
        quantize=quantize,
    )


def _export_checkpoint(
    checkpoint: str | os.PathLike[str], out: Path, quantize: str, progress: Progress
) -> Exported:
    """Writes the quantized form of a checkpoint of Hugging Face, a folder or a repository of the
    hub."""
    source = find_folder(checkpoint)
    config = read_config(source)
    with CheckpointFolder(source) as tensors:
        if tensors.gguf is not None:
            raise ConfigError(
                f"--quantize {quantize}: {tensors.gguf} is a GGUF file; give the checkpoint in "
                "safetensors that it was made from"
            )
        files: dict[str, list[str]] = {str(file.relative_to(source)): [] for file in tensors.files}
        for name in tensors.specs:
            files[str(tensors.file_of(name).relative_to(source))].append(name)
        quantized = _quantized(tensors, config, quantize, files)
        with new_folder(out, quantized.nbytes) as folder:
            copy_texts(source, folder)
            if os.path.lexists(source / PREGATES):
                shutil.copyfile(source / PREGATES, folder / PREGATES)
            quantized.write(folder, progress)
        parameters = sum(spec.numel for spec in tensors.specs.values())
    return Exported(
        str(out), config.model_type, str(source), None, parameters, quantized.nbytes, quantize
    )


class _RunTensors:
    """The tensors of a run by their names in the exported checkpoint."""

    def __init__(
        self,
        folder: Path,
        reader: StreamReader,
        tensors: Mapping[str, Piece],
        specs: dict[str, TensorSpec],
    ) -> None:
        self.folder, self._reader, self._tensors, self.specs = folder, reader, tensors, specs
        self.packed: dict[str, PackedTensor] = {}

    def read(self, name: str, offset: int, out: Tensor) -> None:
        piece = self._tensors[name]
        stored = torch.empty(out.shape, dtype=self.specs[name].dtype)
        self._reader.read_piece(piece.source, piece.offset + offset, stored)
        out.copy_(stored)


def _quantized(
    tensors: Tensors, config: Any, quantize: str, files: Mapping[str, list[str]]
) -> QuantizedFiles:
    model = meta_model(config)
    return QuantizedFiles(Recipes(model, find_experts(model), tensors), quantize, files)


def _write_quantized(
    folder: Path,
    tensors: _RunTensors,
    config: Any,
    quantize: str,
    shard_bytes: int,
    progress: Progress,
) -> int:
    """Writes the weights of a run packed, and returns their size."""
    quantized = _quantized(tensors, config, quantize, _shards(tensors.specs, shard_bytes))
    quantized.write(folder, progress)
    return quantized.nbytes


def _specs(reader: StreamReader, tensors: Mapping[str, Piece]) -> dict[str, TensorSpec]:
    """Types and shapes of the exported tensors; checks that each source element is used once."""
    used: Counter[str] = Counter()
    for piece in tensors.values():
        used[piece.source] += piece.numel
    there = {name: spec.numel for name, spec in reader.specs.items()}
    if used != there:
        name = next(name for name in [*used, *there] if used[name] != there.get(name, 0))
        raise CheckpointError(
            f"{reader.path}: {name} has {there.get(name, 0)} elements, the model in state.json has "
            f"{used[name]}; train again, or use the version of overspill that wrote it"
        )
    return {
        name: TensorSpec(reader.specs[piece.source].dtype, piece.shape)
        for name, piece in tensors.items()
    }


def _write_weights(
    folder: Path,
    reader: StreamReader,
    tensors: Mapping[str, Piece],
    specs: Mapping[str, TensorSpec],
    shard_bytes: int,
    progress: Progress,
) -> None:
    total = sum(spec.nbytes for spec in specs.values())
    done = 0
    shards = _shards(specs, shard_bytes)
    for file, names in shards.items():
        with StreamWriter(
            folder / file, {name: specs[name] for name in names}, {"format": "pt"}
        ) as writer:
            for name in names:
                at = tensors[name].offset
                for start, count in _pieces(specs[name]):
                    value = torch.empty(count, dtype=specs[name].dtype)
                    reader.read_piece(tensors[name].source, at + start, value)
                    writer.write_piece(name, start, value)
                    done += value.nbytes
                    progress("exporting", done, total)
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _pieces(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    """(first element, elements) of the pieces in which a tensor passes through memory."""
    most = _PIECE_BYTES // spec.dtype.itemsize
    return ((start, min(most, spec.numel - start)) for start in range(0, spec.numel, most))


def _shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> dict[str, list[str]]:
    """The tensor names in each file: as many as fit, at least one."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + spec.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += spec.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _write_texts(folder: Path, shape: GPTConfig, dtype: str, files: TokenizerFiles) -> None:
    _write_json(folder / "config.json", exported_config(shape, dtype, files.separator))
    generation = {"eos_token_id": files.separator, "pad_token_id": files.separator}
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer_config.json", files.config)
    (folder / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
