"""`overspill.save`: writes a plain Hugging Face checkpoint, one expert at a time."""

import itertools
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import ConfigError, DiskError
from overspill.core.experts import ExpertId
from overspill.core.sizes import format_size, parse_size
from overspill.hardware.machine import disk_free
from overspill.models.huggingface.checks import INDEX, SINGLE
from overspill.models.huggingface.conversion import model_conversions
from overspill.models.huggingface.folder import silence
from overspill.models.huggingface.packed.config import MODELOPT
from overspill.models.huggingface.pregate_file import FILE as PREGATES
from overspill.models.huggingface.pregate_file import save_beside_adapter
from overspill.models.huggingface.shards import (
    METADATA,
    LayerTensors,
    cut,
    write_index,
    write_shards,
)
from overspill.models.joint_writing import is_first, together, writes_experts
from overspill.models.pregate import pregate_level
from overspill.moe.engine import Engine
from overspill.moe.placeholder import ExpertPlaceholder, OthersPlaceholder, Places
from overspill.moe.state_dict import (
    all_placeholders,
    dense_tensors,
)
from overspill.parallel.sharded import is_sharded, whole
from overspill.tiers.aside import sync, sync_all, temporary_folder
from overspill.tiers.safetensors_stream import StreamWriter

_SHARD = "5GB"
_WRITERS = 4
"""Number of threads that convert and write."""


def save(model: Any, out: str | os.PathLike[str], max_shard_size: str | int = _SHARD) -> None:
    """Writes `model` as a checkpoint that transformers loads without Overspill.

    The layout is that of the original checkpoint. A model with pre-gates is written as the
    conventional one, with its pre-gates in a file beside it. For a model with `peft` adapters only
    these are written, as `peft` does, and its pre-gates. The checkpoint is written to a temporary
    folder and then renamed. For a model with a mesh, all ranks must call this; the `out` of the
    first rank is used.
    """
    plain = model
    if hasattr(model, "get_base_model"):  # peft
        plain = model.get_base_model()
        model.save_pretrained(out)
    elif not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"{type(model).__name__} is not a model of transformers; `overspill export RUN OUT` "
            "makes a Hugging Face checkpoint of a run of `overspill train`"
        )
    else:
        model.save_pretrained(out, max_shard_size=max_shard_size)
    engine = getattr(plain, "overspill", None)  # None: not offloaded
    if engine is not None and not is_first(engine):
        return
    if not pregate_level(plain):
        Path(out, PREGATES).unlink(missing_ok=True)  # pre-gates of an earlier model
    elif plain is not model:
        save_beside_adapter(plain, Path(out))


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    max_shard_size: str | int = _SHARD,
    state_dict: dict[str, Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """`model.save_pretrained` of an offloaded model. Of several ranks, each writes its experts, and
    the first writes the rest."""
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
    """Return the dense tensors. Tensors that ranks divide are gathered in host memory of the first
    rank."""
    dense: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}  # tied weights stay one tensor
    for name, value in dense_tensors(model).items():
        if is_sharded(value) and id(value) not in copies:
            gathered = whole(value)
            copies[id(value)] = gathered.cpu() if is_first(model.overspill) else gathered[:0]
        dense[name] = copies.get(id(value), value)
    return dense


def _temporary_path(out: Path) -> Path:
    """Return the path of the temporary folder. It is inside `out` if that exists, which may be on
    another disk as a link or a mount."""
    return out / ".tmp-checkpoint" if out.is_dir() else out.parent / f".tmp-{out.name}"


def _check_room(out: Path, engine: Engine, model: Any) -> None:
    dense = sum(tensor.nbytes for tensor in dense_tensors(model).values())
    need = engine.expert_parameters * engine.dtype.itemsize + dense
    free = disk_free(out)
    if need > free:
        raise DiskError(
            f"{out}: the checkpoint needs {format_size(need)}, the disk has {format_size(free)} "
            "free; free some space or choose another folder"
        )


def _write_experts(model: Any, folder: Path, shard_bytes: int, stem: str) -> None:
    """Add the experts to a folder that holds the dense part, and an index over both."""
    engine: Engine = model.overspill
    conversions = model_conversions(model)
    layers = [
        _tensors_of(model, conversions, path, placeholder, places)
        for path, placeholder, places in all_placeholders(model)
    ]
    shards = cut(layers, shard_bytes)
    names: list[str] = []
    with together(engine, f"creating {folder}"):
        if is_first(engine):
            names = write_index(folder, shards, stem)
            if engine.ranks is not None:
                for name, specs in zip(names, shards, strict=True):
                    StreamWriter(folder / name, specs, METADATA).abandon()
    if engine.ranks is not None:
        names = engine.ranks.gather(names)[0]
    with together(engine, f"writing {folder}"):
        if writes_experts(engine):
            files = dict(zip(names, shards, strict=True))
            write_shards(folder, layers, files, _WRITERS, shared=engine.ranks is not None)


def _tensors_of(
    model: Any,
    conversions: Sequence[Any],
    path: str,
    placeholder: ExpertPlaceholder | OthersPlaceholder,
    places: Places,
) -> LayerTensors:
    """Return the experts of one layer, of which this process writes the experts of its engine."""
    engine, layer = placeholder.engine, placeholder.layer

    def read(index: int, record: Tensor) -> None:
        assert layer is not None
        engine.records.read_weights(ExpertId(layer, index), record)

    here = engine.experts.local_ids if isinstance(placeholder, ExpertPlaceholder) else ()
    return LayerTensors(
        model, conversions, path, engine.shape, engine.dtype, places, engine.n_experts, here, read
    )


def _free_stem(out: Path) -> str:
    """Return a prefix for the new shards that no existing shard has: an old checkpoint must stay
    complete until the index names the new one."""
    stems = itertools.chain(["model"], (f"model-{number}" for number in itertools.count(2)))
    return next(s for s in stems if not any(out.glob(f"{s}-?????-of-?????.safetensors")))


def _move(temporary: Path, out: Path) -> None:
    """Rename the folder, or its files if `out` exists: the index last, and after it remove the old
    shards. So a checkpoint is complete at any moment."""
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
    """Return whether a file belongs to a checkpoint, and is not a user's file with a similar
    name."""
    return name == SINGLE or bool(re.fullmatch(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors", name))
