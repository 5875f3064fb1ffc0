"""`overspill.load`: reads a Hugging Face checkpoint into the store, expert by expert."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.experts import ExpertId
from overspill.core.options import Size
from overspill.models.budgets import Budgets, OffloadOptions
from overspill.models.checkpoint_presets import preset_config
from overspill.models.fill import ExpertSource
from overspill.models.huggingface.adapt import adapt
from overspill.models.huggingface.checks import find_folder, texts_of
from overspill.models.huggingface.dictionaries import cast_routers
from overspill.models.huggingface.expert_lora import AdaptedExperts
from overspill.models.huggingface.experts import HuggingFaceExperts
from overspill.models.huggingface.folder import CheckpointFolder, read_config, silence
from overspill.models.huggingface.lora import open_lora
from overspill.models.huggingface.lora_config import find_adapter
from overspill.models.huggingface.packed.quantized import QuantizedExperts, check_quantization
from overspill.models.huggingface.packed.records import PackedExperts
from overspill.models.huggingface.pregate_file import has_pregates
from overspill.models.huggingface.pregates import read_pregates
from overspill.models.huggingface.recipes import Recipes
from overspill.models.huggingface.skeleton import Skeleton, model_class
from overspill.models.offload import move_experts
from overspill.moe.init import expert_generator
from overspill.tiers.layout import NO_LOW_RANKS

_log = logging.getLogger("overspill")


def load(
    path_or_repo: str | os.PathLike[str],
    gpu_memory: Size | None = None,
    host_memory: Size | None = None,
    disk: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    train: bool = True,
    freeze_experts: bool = False,
    pregate: bool = True,
    packed: bool | None = None,
    quantize: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    **more: Any,
) -> Any:
    """Loads a Mixture-of-Experts checkpoint (a folder, a GGUF file, or a repository of the hub) as
    a transformers model with its experts offloaded, without ever holding them in memory twice.

    With `train` (the default) the model is in training mode and memory for the optimizer is
    planned; without it, the model is for inference. With `freeze_experts` the experts are
    frozen, and no memory is planned for their gradients and optimizer states. `dtype` is the
    data type of the weights, by default that of the checkpoint. Experts of a quantized
    checkpoint stay packed in all memory and are unpacked when they compute, unless they are
    trained; `packed` False unpacks them while they are read, True raises where they cannot stay
    packed. `quantize` ("mxfp4", "int4" or "fp8") packs the experts of a plain checkpoint like
    that while they are read. A model that was saved with pre-gates gets them, unless `pregate`
    is False. `adapter` is a LoRA adapter to add to the weights: a folder that peft or
    `overspill finetune --lora` has written, or a repository of the hub. Further arguments are
    those of `overspill.offload`; others (`dropout_rate=0`, ...) replace fields of the checkpoint's
    config, as in `from_pretrained`.
    """
    known = {item.name for item in fields(OffloadOptions)}
    given = {name: more.pop(name) for name in known & more.keys()}
    budgets = Budgets(gpu_memory, host_memory, disk, **given)
    return load_within(
        path_or_repo, budgets, dtype, train, more, pregate=pregate, freeze_experts=freeze_experts,
        adapter=None if adapter is None else find_adapter(adapter), packed=packed,
        quantize=quantize,
    )  # fmt: skip


def load_within(
    path_or_repo: str | os.PathLike[str],
    budgets: Budgets,
    dtype: torch.dtype | str | None,
    train: bool,
    changes: Mapping[str, Any] | None = None,
    pregate: bool = True,
    adapter: Path | None = None,
    freeze_experts: bool = False,
    packed: bool | None = None,
    quantize: str | None = None,
    merged: bool = True,
) -> Any:
    """Run `load` with all budgets in one object; `changes` replace fields of the model's config.
    The LoRA adapter in the folder `adapter` is added to the weights; unless `merged`, its part of
    the experts stays beside their weights, in their records."""
    _check_dtype(dtype)
    device = budgets.compute_device
    if packed and quantize is not None:
        raise ConfigError(
            "--packed is for quantized checkpoints, --quantize for others; drop one of them"
        )
    if quantize is not None:
        check_quantization(quantize)
        _check_packed(f"quantize={quantize!r} (--quantize)", budgets, train and not freeze_experts)
    elif packed:
        _check_packed("packed=True (--packed)", budgets, train and not freeze_experts)
    elif train and not freeze_experts:
        packed = False
    folder = find_folder(path_or_repo)
    config = read_config(folder)
    for name, value in (changes or {}).items():
        if not hasattr(config, name):
            kind = type(config).__name__
            raise ConfigError(f"{name}={value!r} is not a field of {kind}, nor an argument of load")
        setattr(config, name, value)
    budgets.settings.check_model(config.model_type)
    with budgets.claimed(device), CheckpointFolder(folder) as checkpoint:
        made = Skeleton(model_class(config), train)
        on_host = budgets.dense_weights == "host"
        where = torch.device("cpu") if on_host else device
        plain = made.plain, config, checkpoint
        with nullcontext() if adapter is None else open_lora(adapter, *plain) as lora:
            model = _load_dense(made.model_class, checkpoint, config, dtype, where)
            model.train(train)
            layers = made.layers
            for layer in layers:
                layer.trained = layer.trained and not freeze_experts
            recipes = Recipes(model, layers, checkpoint, lora, adds_to_experts=merged)
            source: ExpertSource = recipes
            if quantize is not None:
                source = QuantizedExperts(recipes, quantize)
            elif packed is not False:
                source = _stored_experts(recipes, checkpoint, packed is True, budgets)
            if lora is not None and lora.stacks and not merged:
                source = AdaptedExperts(source, lora.stacks, layers)
            # first: it recognizes the weights with which they were saved
            own = None if adapter is None or not has_pregates(adapter) else adapter
            pregates = read_pregates(own or folder, model) if pregate else None
            if lora is not None:
                lora.write_to(model)
            cast_routers(model)  # before dense weights are placed

            def finish() -> None:
                made.restore(model)
                adapt(model, layers)
                if pregates is not None:
                    pregates.add_to(model)

            return move_experts(model, layers, budgets, source, finish)


def _stored_experts(
    recipes: Recipes, checkpoint: CheckpointFolder, required: bool, budgets: Budgets
) -> ExpertSource:
    """Experts as they are stored: packed where the checkpoint has them packed. Unless `required`,
    they are unpacked where they cannot stay packed."""
    stored = (checkpoint.packed.get(key) for key in recipes.keys)
    if not required and all(tensor is None or tensor.is_plain for tensor in stored):
        return recipes
    try:
        if budgets.mesh is not None:
            raise ConfigError("several ranks do not support packed experts yet")
        return PackedExperts(recipes, checkpoint)
    except ConfigError as error:
        if required:
            raise ConfigError(f"{error}; load it without packed=True (--packed)") from None
        _log.warning("experts are unpacked while they are read: %s", error)
        return recipes


def _check_dtype(dtype: torch.dtype | str | None) -> None:
    """Raise unless a name is that of a dtype, or "auto"."""
    if not isinstance(dtype, str) or dtype == "auto":
        return
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(
            f"dtype={dtype!r} is not a dtype of torch; give 'bfloat16', 'float32' or 'auto'"
        )


def _check_packed(option: str, budgets: Budgets, trained: bool) -> None:
    """Raise if experts cannot be packed as `option` requires."""
    reason = None
    if budgets.mesh is not None:
        reason = "several ranks are not supported yet; load the model in one process"
    elif trained:
        reason = "packed experts cannot be trained; give freeze_experts=True or train=False"
    if reason is not None:
        raise ConfigError(f"{option}: {reason}, or leave it out")


def _load_dense(
    kind: Any,
    checkpoint: CheckpointFolder,
    config: Any,
    dtype: torch.dtype | str | None,
    device: torch.device,
) -> Any:
    """Load all but the experts with transformers, which skips tensors without a parameter."""
    folder = checkpoint.folder
    placed = {"device_map": {"": device}} if device.type == "cuda" else {}
    given: dict[str, Any] = {"dtype": dtype or "auto", **placed}
    source: Path | None = folder
    if checkpoint.packed or checkpoint.gguf is not None:
        given["dtype"] = checkpoint.plain_dtype(config) if dtype in (None, "auto") else dtype
        source = None
        given["state_dict"] = {n: _OnDisk(checkpoint, n, given["dtype"]) for n in checkpoint.specs}
    with silence():  # its reports are checked below
        try:
            model, info = kind.from_pretrained(
                source,
                config=config,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **given,
            )
            if source is None:
                _complete(model, folder)
        except torch.OutOfMemoryError:  # the planner's error explains the budget
            if not placed:
                raise
            return _load_dense(kind, checkpoint, config, dtype, torch.device("cpu"))
        except (OSError, ValueError, RuntimeError, LookupError, AttributeError, TypeError) as error:
            if isinstance(error, ConfigError | CheckpointError):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(
                f"{folder} cannot be loaded by transformers ({reason}); check its config.json"
            ) from error
    _check_dense(folder, info)
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map  # the model is on one device
    return model


class _OnDisk:
    """Tensor of a packed checkpoint, which transformers reads with `[...]` if it needs it."""

    def __init__(self, checkpoint: CheckpointFolder, name: str, dtype: object) -> None:
        self._checkpoint, self._name, self._dtype = checkpoint, name, dtype

    def __getitem__(self, _: Any) -> Tensor:
        """Read the tensor. Packed matrices are read in the dtype of the model: in float32 an
        embedding may be larger than all experts of a layer."""
        spec = self._checkpoint.specs[self._name]
        if self._name not in self._checkpoint.packed or not isinstance(self._dtype, torch.dtype):
            return self._checkpoint.read_whole(self._name)
        whole = torch.empty(spec.shape, dtype=self._dtype)
        self._checkpoint.read(self._name, 0, whole)
        return whole


def _complete(model: Any, folder: Path) -> None:
    """Give a model that was loaded from tensors the attributes that transformers reads from the
    folder."""
    from transformers import GenerationConfig

    model.name_or_path = model.config.name_or_path = str(folder)
    texts = texts_of(folder)
    if model.can_generate() and (texts / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(texts)


def _check_dense(folder: Path, info: dict[str, Any]) -> None:
    for name, there, expected in info["mismatched_keys"]:
        raise CheckpointError(
            f"{folder} gives {name} the shape {list(there)}, config.json says {list(expected)}; "
            "they are not of the same model"
        )
    missing: Sequence[str] = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder} holds nothing for {missing[0]}" + _more(missing) + "; it is incomplete"
        )
    for name, error in dict(info.get("conversion_errors") or {}).items():
        reason = str(error).strip().splitlines()[-1]
        raise CheckpointError(f"{folder}: {name} cannot be converted: {reason}")


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def from_config(
    config: Any,
    gpu_memory: Size | None = None,
    host_memory: Size | None = None,
    disk: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    train: bool = True,
    **more: Any,
) -> Any:
    """Make a transformers model with random weights, for training from scratch; its experts are
    initialized in the store.

    `config` is a config of transformers, or the name of a preset (see `overspill.preset_config`).
    `more` are further arguments of `overspill.offload`. Call `torch.manual_seed` first for the same
    weights again, with a mesh on all ranks."""
    config = preset_config(config) if isinstance(config, str) else config
    budgets = Budgets(gpu_memory, host_memory, disk, **more)
    budgets.settings.check_model(config.model_type)
    made, model = random_dense(config, dtype, train)
    cast_routers(model)  # before dense weights are placed

    def finish() -> None:
        made.restore(model)
        adapt(model, made.layers)

    initial = InitialExperts(made.layers, budgets.compute_device)
    return move_experts(model, made.layers, budgets, initial, finish)


def random_dense(config: Any, dtype: torch.dtype, train: bool) -> tuple[Skeleton, Any]:
    """Make a model whose dense part transformers has initialized, and which has no experts yet."""
    made = Skeleton(model_class(config), train)
    with silence():
        model = made.model_class.from_pretrained(None, config=config, state_dict={}, dtype=dtype)
    model.train(train)
    return made, model


class InitialExperts:
    """Source of initial weights that depend only on the seed of torch's generator and on the
    expert, so that they are the same on any number of ranks."""

    buffer_bytes, format, ranks = 0, None, NO_LOW_RANKS

    def __init__(self, layers: Sequence[HuggingFaceExperts], device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._seed = int(torch.randint(1 << 32, ()))

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        """Fill a record, on any thread."""
        generator = expert_generator(self._seed, expert, self._device)
        self._layers[expert.layer].draw(record, generator)
