"""Finds and reads `adapter_config.json` of a LoRA adapter in peft's format."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.checks import ADAPTER_CONFIG, find_folder

WEIGHTS = "adapter_model.safetensors"
MATRIX_A, MATRIX_B = "lora_A.weight", "lora_B.weight"
"""Ends of the names of an adapter's matrices."""
_PICKLE = "adapter_model.bin"
_MODELS = ("final", "best")
"""Folders of a run of `overspill finetune`, in the order of preference."""

_DESCRIPTIONS = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform",
    "layers_pattern", "lora_dropout", "modules_to_save", "bias", "lora_bias",
    "init_lora_weights", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
    # peft takes it from the kind of each layer when it adds the adapter
    "fan_in_fan_out",
})  # fmt: skip
"""Settings that are read here, or that only affect training. All others must be unused."""
_SAFE_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initial weights of an adapter that leave its base as it is."""


@dataclass(frozen=True)
class LoraConfig:
    """Settings of a LoRA adapter."""

    folder: Path
    base: str | None
    """Folder or repository of its base model."""
    revision: str | None
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    targets: tuple[str, ...]
    """Ends of the names of all modules with an adapter; empty if they are chosen otherwise."""
    target_parameters: tuple[str, ...] = ()
    """Ends of the names of parameters with an adapter of their own, such as stacks of experts."""
    library: str | None = None
    """Python module of the class of its base model, as far as peft has noted it."""

    def targets_parameter(self, name: str) -> bool:
        return any(name == end or name.endswith(f".{end}") for end in self.target_parameters)

    def rank_of(self, module: str) -> int:
        """Return the rank for a module, or for a parameter of `target_parameters`."""
        return self.rank_pattern.get(_pattern_for(module, self.rank_pattern), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of B @ A."""
        alpha = self.alpha_pattern.get(_pattern_for(module, self.alpha_pattern), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank

    def refused(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} is not an adapter of this model: {reason}; give the base model that it "
            "was trained on, or copy or download it again"
        )


def _pattern_for(module: str, patterns: Mapping[str, object]) -> str:
    """Return the first pattern that the end of a module's name matches, as in peft."""
    return next((each for each in patterns if re.match(rf"(.*\.)?({each})$", module)), module)


# -- finding it ----------------------------------------------------------------------------------


def find_adapter(path_or_repo: str | os.PathLike[str]) -> Path:
    """Return the local folder of an adapter. For a run of `overspill finetune --lora` it is the
    folder of the final adapter, or before the run's end of the best adapter."""
    path = Path(path_or_repo).expanduser()
    folder = path if path.is_dir() else find_folder(path_or_repo)
    for each in (folder, *(folder / name for name in _MODELS)):
        if (each / ADAPTER_CONFIG).is_file():
            return each
    raise ConfigError(
        f"{path_or_repo} has no {ADAPTER_CONFIG}: it is not a LoRA adapter; give the folder that "
        "overspill finetune --lora or peft has written"
    )


def find_base(config: LoraConfig, given: str | os.PathLike[str] | None = None) -> Path:
    """Return the local folder of the model that an adapter was trained on."""
    if given is not None:
        return find_folder(given)
    advice = (
        f"give its folder as MODEL with --adapter {config.folder}, or to overspill merge with "
        "--base"
    )
    if config.base is None:
        raise ConfigError(f"{config.folder / ADAPTER_CONFIG} names no base model; {advice}")
    if config.revision not in (None, "main") and not Path(config.base).expanduser().is_dir():
        raise ConfigError(
            f"{config.folder} was trained on revision {config.revision} of {config.base}; download "
            f"that, and {advice}"
        )
    try:
        return find_folder(config.base)
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(
            f"the base model of the adapter {config.folder} is missing: {reason}; {advice}"
        ) from error


# -- reading it ----------------------------------------------------------------------------------


def read_lora_config(folder: Path) -> LoraConfig:
    """Return the config of the adapter in `folder`. Raises for adapters that are not computed
    exactly."""
    if not (folder / WEIGHTS).is_file():
        if (folder / _PICKLE).is_file():
            raise CheckpointError(
                f"{folder / _PICKLE} is pickled, which can run any code; Overspill reads "
                f"{WEIGHTS} only. If you trust it, load it with peft and save it again"
            )
        raise CheckpointError(f"{folder} has no {WEIGHTS}; copy or download the adapter again")
    path = folder / ADAPTER_CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}); copy or download the adapter again"
        ) from error
    if not isinstance(raw, dict):
        raise _invalid(path, "it is not a JSON object")
    _refuse_others(path, raw)
    return LoraConfig(
        folder=folder,
        base=_text(path, raw, "base_model_name_or_path"),
        revision=_text(path, raw, "revision"),
        rank=_rank(path, "r", raw.get("r")),
        alpha=_alpha(path, "lora_alpha", raw.get("lora_alpha")),
        rank_pattern={k: _rank(path, k, v) for k, v in _patterns(path, raw, "rank_pattern")},
        alpha_pattern={k: _alpha(path, k, v) for k, v in _patterns(path, raw, "alpha_pattern")},
        rank_stabilized=bool(raw.get("use_rslora")),
        targets=_targets(raw),
        target_parameters=_target_parameters(path, raw),
        library=_library(raw),
    )


def _refuse_others(path: Path, raw: Mapping[str, Any]) -> None:
    """Raises if the adapter is more than a product of two matrices that is added to weights."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ConfigError(
            f"{path}: peft_type is {kind}; only LORA is supported; merge this adapter with peft"
        )
    if raw.get("use_dora"):
        raise ConfigError(f"{path}: use_dora (DoRA) is not supported; merge this adapter with peft")
    for name, value in raw.items():
        if name not in _DESCRIPTIONS and value not in (None, False, [], {}, ""):
            raise ConfigError(f"{path}: {name} is not supported; merge this adapter with peft")
    start = raw.get("init_lora_weights")
    if not any(
        start is each or (start == each and isinstance(start, str)) for each in _SAFE_STARTS
    ):
        raise ConfigError(
            f"{path}: init_lora_weights is {start}, which changes the weights of the base model "
            "before training; save the adapter with peft's "
            "path_initial_model_for_weight_conversion, or merge it with peft"
        )


def _text(path: Path, raw: Mapping[str, Any], name: str) -> str | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise _invalid(path, f"{name} is not a string")
    return value or None


def _rank(path: Path, name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise _invalid(path, f"the rank {name} is {value!r}, not a whole number from 1 on")
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(str(value))):
        raise _invalid(path, f"the alpha {name} is {value!r}, not a number")
    assert isinstance(value, int | float)
    return value


def _patterns(path: Path, raw: Mapping[str, Any], name: str) -> list[tuple[str, object]]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise _invalid(path, f"{name} is not a JSON object")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise _invalid(path, f"{name} has {pattern!r}, no regular expression") from error
    return list(value.items())


def _targets(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the targeted modules, without modules that other settings exclude."""
    given = raw.get("target_modules")
    narrowed = any(raw.get(n) for n in ("exclude_modules", "layers_to_transform", "layers_pattern"))
    if narrowed or not isinstance(given, list):
        return ()
    return tuple(each for each in given if isinstance(each, str))


def _target_parameters(path: Path, raw: Mapping[str, Any]) -> tuple[str, ...]:
    given = raw.get("target_parameters") or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise _invalid(path, "target_parameters is not a list of names")
    return tuple(given)


def _library(raw: Mapping[str, Any]) -> str | None:
    mapping = raw.get("auto_mapping")
    library = mapping.get("parent_library") if isinstance(mapping, dict) else None
    return library if isinstance(library, str) else None


def _invalid(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: {reason}; copy or download the adapter again")
