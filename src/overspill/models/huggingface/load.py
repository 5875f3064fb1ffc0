"""`overspill.load`: a Hugging Face checkpoint straight into the store, expert by expert."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.experts import ExpertId
from overspill.models.huggingface.adapt import adapt
from overspill.models.huggingface.experts import DictionaryExperts
from overspill.models.huggingface.folder import CheckpointFolder, find_folder, read_config, silence
from overspill.models.huggingface.recipes import Recipes
from overspill.models.huggingface.skeleton import Skeleton, model_class
from overspill.models.offload import Budgets, Size, compute_device, counted, hand_over
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.tiers.slab import Progress

_READERS = 8
"""Threads that read: enough to keep an NVMe disk busy."""
_BUFFERS = 3 << 29
"""Most bytes of experts that are on their way at once, where they cannot be read into place."""


def load(
    path_or_repo: str | os.PathLike[str],
    gpu_memory: Size = None,
    host_memory: Size = None,
    disk: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    mode: str = "auto",
    slots: int | None = None,
    host_slots: int | None = None,
    *,
    train: bool = True,
    settings: Settings | None = None,
    state_dtype: torch.dtype = torch.float32,
    keep_gradients: bool | None = None,
    progress: bool | Progress = True,
    quiet: bool = False,
    **config: Any,
) -> Any:
    """A Mixture-of-Experts checkpoint (a folder, or a repository of the hub) as the transformers
    model it is, with its experts where the budgets allow: `overspill.offload` without ever holding
    them in memory twice.

    `dtype` is that of the weights; left out, the checkpoint's. With `train` (the default) the model
    is in training mode and memory for the optimizer is planned; without, it is for inference. The
    other arguments are those of `overspill.offload`; what is left (`dropout_rate=0`, ...) replaces
    fields of the checkpoint's config, as in `from_pretrained`.
    """
    budgets = Budgets(
        gpu_memory,
        host_memory,
        disk,
        device,
        mode,
        slots,
        host_slots,
        settings or Settings(),
        state_dtype,
        keep_gradients,
    )
    where = compute_device(device)
    folder = find_folder(path_or_repo)
    settings_of_model = read_config(folder)
    for name, value in config.items():
        if not hasattr(settings_of_model, name):
            kind = type(settings_of_model).__name__
            raise ConfigError(f"{name}={value!r} is not a field of {kind}, nor an argument of load")
        setattr(settings_of_model, name, value)
    with CheckpointFolder(folder) as checkpoint:
        made = Skeleton(model_class(settings_of_model), train)
        model = _load_dense(made.model_class, folder, settings_of_model, dtype, where)
        model.train(train)
        layers = made.layers
        recipes = Recipes(model, layers, checkpoint)

        def fill(engine: Engine, progress: Progress | None) -> None:
            tell = counted(engine, progress)

            def fill_one(expert: ExpertId, record: Tensor) -> None:
                recipes.fill(expert, record)
                tell()

            engine.records.fill(fill_one, _readers(engine, recipes), on_host=True)

        hand_over(model, layers, budgets, progress, quiet, fill)
    made.restore(model)
    return adapt(model, layers)


def _readers(engine: Engine, recipes: Recipes) -> int:
    """As many threads as read at once without their buffers growing past _BUFFERS."""
    on_its_way = engine.placement.mode != "host"  # to the disk or to the device
    each = engine.layout.weight_bytes * (int(on_its_way) + 2 * int(recipes.copies))
    return _READERS if each == 0 else max(1, min(_READERS, _BUFFERS // each))


def _load_dense(
    kind: Any, folder: Path, config: Any, dtype: torch.dtype | str | None, device: torch.device
) -> Any:
    """All but the experts, by transformers itself, which never reads what has no place."""
    placed = {"device_map": {"": device}} if device.type == "cuda" else {}
    with silence():  # what it would report is looked at below
        try:
            model, info = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype or "auto",
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **placed,
            )
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{folder} cannot be loaded: {reason}") from error
    _check_dense(folder, info)
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map  # it is on one device, like any other model
    return model


def _check_dense(folder: Path, info: dict[str, Any]) -> None:
    for name, there, expected in info["mismatched_keys"]:
        raise CheckpointError(
            f"{folder} gives {name} the shape {list(there)}, config.json says {list(expected)}; "
            "they are not of the same model"
        )
    missing: Sequence[str] = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder} holds nothing for {missing[0]}" + _more(missing) + "; it is not complete"
        )
    for name, error in dict(info.get("conversion_errors") or {}).items():
        reason = str(error).strip().splitlines()[-1]
        raise CheckpointError(f"{folder}: {name} cannot be converted: {reason}")


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def from_config(
    config: Any,
    gpu_memory: Size = None,
    host_memory: Size = None,
    disk: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    mode: str = "auto",
    slots: int | None = None,
    host_slots: int | None = None,
    *,
    train: bool = True,
    settings: Settings | None = None,
    state_dtype: torch.dtype = torch.float32,
    keep_gradients: bool | None = None,
    progress: bool | Progress = True,
    quiet: bool = False,
) -> Any:
    """A transformers model of this config with random weights, to be trained from nothing; its
    experts are drawn straight into the store."""
    budgets = Budgets(
        gpu_memory,
        host_memory,
        disk,
        device,
        mode,
        slots,
        host_slots,
        settings or Settings(),
        state_dtype,
        keep_gradients,
    )
    made = Skeleton(model_class(config), train)
    with silence():
        model = made.model_class.from_pretrained(None, config=config, state_dict={}, dtype=dtype)
    model.train(train)
    if isinstance(made.layers[0], DictionaryExperts):
        raise ConfigError(
            f"from_config does not draw the weights of {config.model_type}; save a model made by "
            "transformers and load that"
        )
    hand_over(model, made.layers, budgets, progress, quiet)
    made.restore(model)
    return adapt(model, made.layers)
