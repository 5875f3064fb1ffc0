"""Exports the newest checkpoint of a run to Hugging Face format, tensor by tensor."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overspill.core.errors import CheckpointError
from overspill.models.config import GPTConfig
from overspill.models.huggingface.from_gpt import (
    Piece,
    exported_config,
    exported_tensors,
    is_mixtral,
)
from overspill.tiers.aside import check_new, new_folder
from overspill.tiers.safetensors_stream import StreamReader, StreamWriter, TensorSpec
from overspill.train import checkpoint
from overspill.train.export_tokenizer import TokenizerFiles, tokenizer_files
from overspill.train.trained import find_checkpoint, find_shape

_SHARD_BYTES = 5 * 10**9  # as in save_pretrained
_PIECE_BYTES = 256 * 2**20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Exported:
    """What was written."""

    out: str
    model_type: str
    checkpoint: str
    step: int
    parameters: int
    bytes: int
    """Size of the weights."""


def export(
    run: Path,
    out: Path,
    tokenizer: str | None = None,
    shard_bytes: int = _SHARD_BYTES,
    progress: Progress = lambda what, done, total: None,
) -> Exported:
    """Writes the newest checkpoint of `run` to the new folder `out`, for `from_pretrained`: as a
    Mixtral if that computes the same, else as a `GPTMoEForCausalLM` (see `from_gpt`).

    `tokenizer` replaces that of the run, for example if it was moved.
    """
    check_new(out)
    config, path = find_checkpoint(run)
    state = checkpoint.read_state(path)
    shape = find_shape(config, state, path)
    files = tokenizer_files(tokenizer or config.data.tokenizer, shape)
    tensors = exported_tensors(shape)
    with StreamReader(path / "model.safetensors") as reader:
        specs = _specs(reader, tensors)
        with new_folder(out) as folder:
            _write_texts(folder, shape, str(state.facts["dtype"]), files)
            _write_weights(folder, reader, tensors, specs, shard_bytes, progress)
    return Exported(
        out=str(out),
        model_type="mixtral" if is_mixtral(shape) else "overspill_gpt",
        checkpoint=str(path),
        step=state.step,
        parameters=shape.total_params,
        bytes=sum(spec.nbytes for spec in specs.values()),
    )


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
    """(first element, elements) of the parts of a tensor that are in memory at once."""
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
