"""`overspill.save`: writes a plain Hugging Face checkpoint, one expert at a time."""

import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import ConfigError, DiskError
from overspill.core.experts import ExpertId
from overspill.core.sizes import format_size, parse_size
from overspill.hardware.machine import disk_free
from overspill.models.huggingface.checks import INDEX, SINGLE
from overspill.models.huggingface.folder import silence
from overspill.models.huggingface.packed.config import MODELOPT
from overspill.models.huggingface.pregates import FILE as PREGATES
from overspill.models.joint_writing import is_first, together, writes_experts
from overspill.models.pregate import pregate_level
from overspill.moe.engine import Engine
from overspill.moe.placeholder import ExpertPlaceholder, OthersPlaceholder
from overspill.moe.state_dict import (
    Place,
    Places,
    all_placeholders,
    dense_tensors,
    split_record,
    stack_sizes,
)
from overspill.parallel.sharded import is_sharded, whole
from overspill.tiers.aside import sync, sync_all, temporary_folder
from overspill.tiers.safetensors_stream import StreamReader, StreamWriter, TensorSpec
from overspill.transfer.requests import run_all

_METADATA = {"format": "pt"}
_SHARD = "5GB"
_WRITERS = 4
"""Threads that convert and write."""


def save(model: Any, out: str | os.PathLike[str], max_shard_size: str | int = _SHARD) -> None:
    """Writes `model` as a checkpoint that transformers loads without Overspill.

    The layout is that of the original checkpoint. A model with pre-gates is written as the
    conventional one, with its pre-gates in a file beside it. For a model with `peft` adapters only
    these are written, as `peft` does. The checkpoint is written to a temporary folder and then
    renamed. For a model with a mesh, all ranks must call this; `out` is that of the first one.
    """
    if hasattr(model, "get_base_model"):  # peft
        if pregate_level(model):
            raise ConfigError(
                "a folder of peft adapters cannot hold pre-gates; merge the adapters first: "
                "overspill.save(model.merge_and_unload(), ...)"
            )
        model.save_pretrained(out)
    elif not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"{type(model).__name__} is not a model of transformers; `overspill export RUN OUT` "
            "makes a Hugging Face checkpoint of a run of `overspill train`"
        )
    else:
        model.save_pretrained(out, max_shard_size=max_shard_size)
        engine = getattr(model, "overspill", None)  # None: not offloaded
        if not pregate_level(model) and (engine is None or is_first(engine)):
            Path(out, PREGATES).unlink(missing_ok=True)  # those of a model that was there before


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    max_shard_size: str | int = _SHARD,
    state_dict: dict[str, Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """`model.save_pretrained` of an offloaded model. Of several ranks each writes its experts, and
    the first one the rest."""
    refused = {
        "state_dict": state_dict is not None,
        "push_to_hub": kwargs.get("push_to_hub"),
        "variant": kwargs.get("variant"),
        "save_original_format=False": not kwargs.get("save_original_format", True),
    }
    for flag, asked in refused.items():
        if asked:
            raise ConfigError(
                f"save_pretrained({flag}) is not supported for an offloaded model; save it without "
                "and load that with transformers"
            )
    from safetensors import SafetensorError

    shard_bytes = parse_size(max_shard_size, "max_shard_size")
    engine: Engine = model.overspill
    out = Path(os.path.realpath(save_directory))  # "." has no name, a link may lead to nothing yet
    if engine.ranks is not None:
        engine.ranks.meet("saving a model with a mesh")
        out = engine.ranks.gather(out)[0]
    first, path = is_first(engine), _temporary_path(out)
    try:
        with temporary_folder(path) if first else nullcontext(path) as temporary:
            with together(engine, f"saving {out}"):
                if engine.can_train:
                    engine.training.check_between_steps("saved")
                engine.flush()
                dense = _whole_dense(model)
                if first:
                    _check_room(out, engine, model)
                    # transformers writes the dense part, with its ties, names and configs
                    with silence():
                        type(model).save_pretrained(
                            model,
                            temporary,
                            state_dict=dense,
                            max_shard_size=max_shard_size,
                            **kwargs,
                        )
            _write_experts(model, temporary, shard_bytes, _free_stem(out))
            with together(engine, f"completing {out}"):
                if first:
                    sync_all(temporary)
                    _move(temporary, out)
        engine.records.mark_saved(out)
    except (OSError, SafetensorError) as error:
        if isinstance(error, DiskError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise DiskError(
            f"{out} cannot be written ({reason}); free some space or choose another folder"
        ) from error


@torch.no_grad()
def _whole_dense(model: Any) -> dict[str, Tensor]:
    """The dense tensors; those that ranks divide are gathered, in host memory of the first one."""
    dense: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}  # tied weights stay one tensor
    for name, value in dense_tensors(model).items():
        if is_sharded(value) and id(value) not in copies:
            gathered = whole(value)
            copies[id(value)] = gathered.cpu() if is_first(model.overspill) else gathered[:0]
        dense[name] = copies.get(id(value), value)
    return dense


def _temporary_path(out: Path) -> Path:
    """Inside the folder if it exists: as a link or a mount it may be on another disk."""
    return out / ".tmp-checkpoint" if out.is_dir() else out.parent / f".tmp-{out.name}"


def _check_room(out: Path, engine: Engine, model: Any) -> None:
    dense = sum(tensor.nbytes for tensor in dense_tensors(model).values())
    layers, each = engine.layer_map.n_layers * engine.n_experts, engine.layout.weight_bytes
    need, free = layers * each + dense, disk_free(out)
    if need > free:
        raise DiskError(
            f"{out}: the checkpoint needs {format_size(need)}, the disk has {format_size(free)} "
            "free; free some space or choose another folder"
        )


@dataclass(frozen=True)
class _LayerExperts:
    """The experts of one layer, under their names in the checkpoint."""

    model: Any
    conversions: Sequence[Any]
    path: str
    placeholder: ExpertPlaceholder | OthersPlaceholder
    places: Places

    def specs(self) -> dict[str, TensorSpec]:
        """All expert tensors of the layer in the layout of the checkpoint."""
        dtype = self.placeholder.engine.dtype
        stacks = {
            f"{self.path}.{name}": torch.empty(size, dtype=dtype, device="meta")
            for name, size in stack_sizes(self.placeholder, self.places).items()
        }
        reverted = self._reverted(stacks)
        return {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in reverted.items()}

    def pieces(self, index: int, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, int, Tensor]]:
        """(name, offset, values) of one expert in the checkpoint."""
        engine = self.placeholder.engine
        assert self.placeholder.layer is not None
        record = torch.empty(engine.shape.numel, dtype=engine.dtype)
        engine.records.read_weights(ExpertId(self.placeholder.layer, index), record)
        parts = split_record(record, engine.shape)
        for place, part in zip(self.places(index), parts, strict=True):
            yield from self._pieces_of(place, part, specs)

    def _pieces_of(
        self, place: Place, part: Tensor, specs: dict[str, TensorSpec]
    ) -> Iterator[tuple[str, int, Tensor]]:
        name = f"{self.path}.{place.name}"
        if place.expert is None:
            for key, value in self._reverted({name: part}).items():
                yield key, 0, value
            return
        # converted as a stack of one expert, whose names are those of expert 0
        order = list(specs)
        for key, value in self._reverted({name: part.unsqueeze(0)}).items():
            if specs[key].numel == value.numel():  # separate experts, in consecutive order
                yield order[order.index(key) + place.expert], 0, value
            else:
                yield key, place.expert * value.numel(), value

    def _reverted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with the names and layout of the original checkpoint."""
        from transformers.core_model_loading import revert_weight_conversion

        stand_in: Any = _WithExperts(self.model, self.conversions, tensors)
        made: dict[str, Tensor] = revert_weight_conversion(stand_in, tensors)
        return made


class _WithExperts:
    """A model that has its conversions, and the experts' parameters for converters that read their
    shapes."""

    def __init__(self, model: Any, conversions: Sequence[Any], tensors: dict[str, Tensor]) -> None:
        self._model, self._tensors = model, tensors
        self._weight_conversions = conversions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Tensor:
        return self._tensors[name]


def _conversions(model: Any) -> Sequence[Any]:
    """What `revert_weight_conversion` reverts. For a model that was not loaded, it would collect
    them again in each call: half of the time of saving small experts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found: Sequence[Any] | None = getattr(model, "_weight_conversions", None)
    if found is None:
        default = get_model_conversion_mapping(model, add_legacy=False)
        found = [each for each in default if not isinstance(each, PrefixChange)]
    return found


def _write_experts(model: Any, folder: Path, shard_bytes: int, stem: str) -> None:
    """Adds the experts to a folder that holds the dense part, and an index over both."""
    engine: Engine = model.overspill
    conversions = _conversions(model)
    layers = [_LayerExperts(model, conversions, *found) for found in all_placeholders(model)]
    plans = [(layer, layer.specs()) for layer in layers]
    shards = _cut([specs for _, specs in plans], shard_bytes)
    names: list[str] = []
    with together(engine, f"creating {folder}"):
        if is_first(engine):
            names = _write_index(folder, shards, stem)
            if engine.ranks is not None:
                for name, specs in zip(names, shards, strict=True):
                    StreamWriter(folder / name, specs, _METADATA).abandon()
    if engine.ranks is not None:
        names = engine.ranks.gather(names)[0]
    with together(engine, f"writing {folder}"):
        if writes_experts(engine):
            _write_shards(folder, plans, dict(zip(names, shards, strict=True)))


def _write_index(folder: Path, shards: Sequence[dict[str, TensorSpec]], stem: str) -> list[str]:
    """Numbers the files of the dense part and writes an index over them and the shards, whose names
    are returned."""
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


def _write_shards(
    folder: Path,
    plans: Sequence[tuple[_LayerExperts, dict[str, TensorSpec]]],
    shards: dict[str, dict[str, TensorSpec]],
) -> None:
    """Writes layer by layer, and closes each file after its last layer."""
    writers: dict[str, StreamWriter] = {}
    files = {key: name for name, specs in shards.items() for key in specs}
    shared = plans[0][0].placeholder.engine.ranks is not None
    left = {name: len(specs) for name, specs in shards.items()}
    try:
        for layer, specs in plans:
            for file in dict.fromkeys(files[key] for key in specs):
                if file not in writers:
                    writers[file] = StreamWriter(folder / file, shards[file], _METADATA, shared)

            def write(index: int, layer: _LayerExperts = layer, specs: Any = specs) -> None:
                for key, offset, value in layer.pieces(index, specs):
                    writers[files[key]].write_piece(key, offset, value.contiguous())

            if isinstance(layer.placeholder, ExpertPlaceholder):  # else another rank has it
                run_all(write, layer.placeholder.engine.experts.local_ids, _WRITERS)
            for key in specs:
                left[files[key]] -= 1
            for file in [file for file in writers if left[file] == 0]:
                writers.pop(file).close()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise


def _cut(layers: Sequence[dict[str, TensorSpec]], shard_bytes: int) -> list[dict[str, TensorSpec]]:
    """Tensors in the order of layers, in files of about `shard_bytes`."""
    shards: list[dict[str, TensorSpec]] = []
    size = shard_bytes + 1
    for specs in layers:
        for key, spec in specs.items():
            if size + spec.nbytes > shard_bytes:
                shards.append({})
                size = 0
            shards[-1][key] = spec
            size += spec.nbytes
    return shards


def _dense_files(folder: Path) -> dict[str, str]:
    """Tensor → file of the dense part."""
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


def _free_stem(out: Path) -> str:
    """A prefix for the new shards that no existing shard has: an old checkpoint must stay complete
    until the index names the new one."""
    stems = itertools.chain(["model"], (f"model-{number}" for number in itertools.count(2)))
    return next(s for s in stems if not any(out.glob(f"{s}-?????-of-?????.safetensors")))


def _move(temporary: Path, out: Path) -> None:
    """Renames the folder, or its files if `out` exists: the index last, and after it the old shards
    are removed. So a checkpoint is complete at any moment."""
    if not out.exists():
        os.rename(temporary, out)
        sync(out.parent)
        return
    new = sorted(temporary.iterdir(), key=lambda file: file.name == INDEX)
    names = {file.name for file in new}
    old = [
        f for f in out.iterdir() if _is_weights(f.name) or f.name in {PREGATES, MODELOPT} - names
    ]
    for file in new:
        if file.name == INDEX:
            sync(out)
        os.replace(file, out / file.name)
    sync(out)
    for file in old:
        file.unlink()


def _is_weights(name: str) -> bool:
    """Whether a file is one of a checkpoint, not a user's file with a similar name."""
    return name == SINGLE or bool(re.fullmatch(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors", name))
