"""Files of a checkpoint: shards with the experts under their names in the checkpoint, and the
index.

The dense part is written by transformers before; the experts follow, one record at a time.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.experts import ExpertShape
from overspill.models.huggingface.checks import INDEX, SINGLE
from overspill.models.huggingface.conversion import reverted
from overspill.moe.placeholder import Place, Places
from overspill.moe.state_dict import split_record, tensor_sizes
from overspill.tiers.safetensors_stream import StreamReader, StreamWriter, TensorSpec
from overspill.transfer.requests import run_all

METADATA = {"format": "pt"}


@dataclass(frozen=True)
class LayerTensors:
    """Experts of one layer, under their names in the checkpoint."""

    model: Any
    conversions: Sequence[Any]
    """Conversions of the model (`model_conversions`)."""
    path: str
    shape: ExpertShape
    dtype: torch.dtype
    places: Places
    n_experts: int
    here: Sequence[int]
    """Experts that this process writes."""
    read: Callable[[int, Tensor], None]
    """Function that fills a record with the weights of one expert; called by several threads."""

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """All expert tensors of the layer in the layout of the checkpoint."""
        sizes = tensor_sizes(self.shape, self.n_experts, self.places)
        stacks = {
            f"{self.path}.{name}": torch.empty(size, dtype=self.dtype, device="meta")
            for name, size in sizes.items()
        }
        reverted = self._reverted(stacks)
        return {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in reverted.items()}

    def pieces(self, index: int) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (name, offset, values) of one expert in the checkpoint."""
        record = torch.empty(self.shape.numel, dtype=self.dtype)
        self.read(index, record)
        parts = split_record(record, self.shape)
        for place, part in zip(self.places(index), parts, strict=True):
            yield from self._pieces_of(place, part)

    def _pieces_of(self, place: Place, part: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        name = f"{self.path}.{place.name}"
        if place.expert is None:
            for key, value in self._reverted({name: part}).items():
                yield key, 0, value
            return
        # converted as a stack of one expert, which has the names of expert 0
        specs = self.specs
        order = list(specs)
        for key, value in self._reverted({name: part.unsqueeze(0)}).items():
            if specs[key].numel == value.numel():  # separate experts, in consecutive order
                yield order[order.index(key) + place.expert], 0, value
            else:
                yield key, place.expert * value.numel(), value

    def _reverted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return reverted(self.model, self.conversions, tensors)


def write_index(folder: Path, shards: Sequence[dict[str, TensorSpec]], stem: str) -> list[str]:
    """Number the files of the dense part and write an index over them and the shards. Returns the
    names of the shards."""
    weight_map = _dense_files(folder)
    dense = sorted(set(weight_map.values()))
    count = len(dense) + len(shards)
    renamed = {name: _shard_name(stem, number, count) for number, name in enumerate(dense, 1)}
    for old, new in renamed.items():
        os.rename(folder / old, folder / f"{new}.part")
    for new in renamed.values():
        os.rename(folder / f"{new}.part", folder / new)
    files = {key: renamed[file] for key, file in weight_map.items()}
    names = [_shard_name(stem, number, count) for number in range(len(dense) + 1, count + 1)]
    for name, specs in zip(names, shards, strict=True):
        files |= dict.fromkeys(specs, name)
    size = sum(spec.nbytes for specs in shards for spec in specs.values())
    size += sum(_tensor_bytes(folder / name) for name in renamed.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return names


def write_shards(
    folder: Path,
    layers: Sequence[LayerTensors],
    shards: dict[str, dict[str, TensorSpec]],
    workers: int,
    shared: bool = False,
    written: Callable[[int], None] = lambda size: None,
) -> None:
    """Write layer by layer, and close each file after its last layer. With `shared`, the files
    exist and other processes write to them too. `written` is called with the bytes of each
    record."""
    writers: dict[str, StreamWriter] = {}
    files = {key: name for name, specs in shards.items() for key in specs}
    left = {name: len(specs) for name, specs in shards.items()}
    try:
        for layer in layers:
            for file in dict.fromkeys(files[key] for key in layer.specs):
                if file not in writers:
                    writers[file] = StreamWriter(folder / file, shards[file], METADATA, shared)

            def write(index: int, layer: LayerTensors = layer) -> None:
                for key, offset, value in layer.pieces(index):
                    writers[files[key]].write_piece(key, offset, value.contiguous())
                written(layer.shape.numel * layer.dtype.itemsize)

            run_all(write, layer.here, workers)
            for key in layer.specs:
                left[files[key]] -= 1
            for file in [file for file in writers if left[file] == 0]:
                writers.pop(file).close()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise


def cut(layers: Sequence[LayerTensors], shard_bytes: int) -> list[dict[str, TensorSpec]]:
    """Divide the tensors, in the order of layers, into files of about `shard_bytes`."""
    shards: list[dict[str, TensorSpec]] = []
    size = shard_bytes + 1
    for layer in layers:
        for key, spec in layer.specs.items():
            if size + spec.nbytes > shard_bytes:
                shards.append({})
                size = 0
            shards[-1][key] = spec
            size += spec.nbytes
    return shards


def _dense_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor of the dense part."""
    if (folder / INDEX).is_file():
        found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return found
    with StreamReader(folder / SINGLE) as reader:
        return dict.fromkeys(reader.specs, SINGLE)


def _tensor_bytes(file: Path) -> int:
    with StreamReader(file) as reader:
        return sum(spec.nbytes for spec in reader.specs.values())


def _shard_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.safetensors"
