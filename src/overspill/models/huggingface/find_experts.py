"""Finds the experts of a model, and refuses models whose experts Overspill cannot compute."""

from collections.abc import Sequence
from typing import Any

from overspill.core.errors import ConfigError
from overspill.models.expert_layers import check_layers
from overspill.models.huggingface.dictionaries import style_of
from overspill.models.huggingface.experts import (
    PLACEHOLDER,
    DictionaryExperts,
    HuggingFaceExperts,
    StackedExperts,
    expert_keys,
)
from overspill.moe.layer import MoE

_INTERFACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def find_experts(model: Any) -> list[HuggingFaceExperts]:
    """Return the experts modules of a model, lowest first. Raises for experts that Overspill cannot
    compute exactly, before anything is moved."""
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    found: list[HuggingFaceExperts] = []
    for path, module in model.named_modules():
        if hasattr(module, PLACEHOLDER) and module is not model:
            raise ConfigError("the model is offloaded already; offload it once")
        stacked = all(hasattr(module, name) for name in _INTERFACE)
        style = style_of(module)
        if (stacked and module.num_experts == 0) or (style and not expert_keys(module)):
            raise ConfigError(
                f"{path} has no experts: {_empty_field(model)} is 0 in the config; set it to at "
                "least 1"
            )
        if stacked:
            found.append(StackedExperts(path, module, std))
        elif style:
            found.append(DictionaryExperts(path, module, style, model.config))
    _refuse_others(model, found)
    _check_per_token(model, found[0].n_experts)
    check_layers({layer.path: layer for layer in found}, model.training)
    return found


def experts_paths(model: Any) -> list[str]:
    """Return the paths of the modules with experts, lowest first, whether they are offloaded or
    not; of a GPT-MoE the MoE layers. Raises for a transformers model that is not supported."""
    if not hasattr(model, "set_experts_implementation"):
        return [path for path, module in model.named_modules() if isinstance(module, MoE)]
    found = [
        path
        for path, module in model.named_modules()
        # not a model or a wrapper of one, such as peft's: there the name is the engine's
        if hasattr(getattr(module, PLACEHOLDER, None), "is_expert_placeholder")
        or all(hasattr(module, name) for name in _INTERFACE)
        or style_of(module) is not None
    ]
    if not found:
        _refuse_others(model, [])
    return found


def _empty_field(model: Any) -> str:
    """Return the field of the config that gives the number of experts as 0."""
    text = model.config.get_text_config()
    names = [count for count in _COUNTS if getattr(text, count, None) == 0]
    return str(text.attribute_map.get(names[0], names[0])) if names else "the number of experts"


def _check_per_token(model: Any, n_experts: int) -> None:
    """Raise if a token is to have more experts than there are: its first batch would fail."""
    text = model.config.get_text_config()
    for name in _PER_TOKEN:
        count = getattr(text, name, None)
        if isinstance(count, int) and count > n_experts:
            raise ConfigError(
                f"{name}={count} is more than the {n_experts} experts of each layer; correct "
                "config.json"
            )


def _refuse_others(model: Any, found: Sequence[HuggingFaceExperts]) -> None:
    """Raises if there are experts of an unknown kind: they would silently stay on the GPU."""
    name = f"{model.config.model_type} ({type(model).__name__})"
    text = model.config.get_text_config()
    counts = {getattr(text, count, None) for count in _COUNTS}
    known = {id(p) for layer in found for p in layer.expert_parameters()}
    for path, parameter in model.named_parameters():
        if id(parameter) not in known and parameter.dim() >= 3 and len(parameter) in counts:
            raise ConfigError(
                f"{name}: {path} looks like experts that do not go through transformers' experts "
                "interface; this architecture is not supported"
            )
    if not found:
        why = "it has no experts"
        if any(isinstance(count, int) and count > 1 for count in counts):
            why = "its experts do not go through transformers' experts interface"
        raise ConfigError(f"{name} is not supported: {why}; see docs/families.md")
