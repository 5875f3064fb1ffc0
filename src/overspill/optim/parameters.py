"""Parameters and parameter groups that `overspill.AdamW` accepts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.optim.dense import MOMENTS

_VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable")
"""Keys of torch.optim.AdamW's groups that change a step. `foreach` and `fused` choose one of
several implementations of the same step: they have no effect."""


def check_group(group: Mapping[str, Any]) -> None:
    """Raises for values that torch.optim.AdamW refuses, and for other variants than AdamW."""
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ConfigError(f"{name}={group[name]} must not be negative")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ConfigError(f"betas={group['betas']} must be two numbers, each in [0, 1)")
    check_variant(group)


def check_variant(group: Mapping[str, Any]) -> None:
    """Raises if a group asks for another computation than AdamW's. Called in every step, because a
    group may be changed at any time."""
    for name in _VARIANTS:
        if group.get(name):
            raise ConfigError(
                f"{name}={group[name]} is not supported by overspill.AdamW; leave it out, or set "
                "it to False in param_groups"
            )
    if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
        raise ConfigError(
            "decoupled_weight_decay=False (the L2 penalty of torch.optim.Adam) is not supported by "
            "overspill.AdamW; set it to True, or weight_decay to 0, in param_groups"
        )


def check_dense(parameter: Tensor) -> None:
    """Raises for a dense parameter that cannot be updated."""
    if parameter.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"a dense parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; "
            "overspill.AdamW updates float32 and bfloat16: convert the model before offloading it, "
            "or freeze the parameter with requires_grad_(False)"
        )
    sparse = parameter.grad is not None and parameter.grad.layout != torch.strided
    if sparse or parameter.layout != torch.strided:
        raise ConfigError(
            f"a dense parameter of shape {tuple(parameter.shape)} is sparse or has a sparse "
            "gradient, which overspill.AdamW does not support; make it dense (for nn.Embedding: "
            "sparse=False), or freeze it"
        )


def is_placeholder(parameter: Tensor) -> bool:
    return getattr(parameter, "is_expert_placeholder", False)


def has_experts(parameter: Tensor) -> bool:
    """Whether it is the placeholder of a layer whose experts this process has."""
    return is_placeholder(parameter) and getattr(parameter, "layer", None) is not None


def check_entries(parameters: Sequence[Any], entries: Sequence[Any]) -> None:
    """Raises if an entry of a state dict is not an AdamW state of its parameter. None: it has no
    state."""
    for number, (parameter, entry) in enumerate(zip(parameters, entries, strict=True)):
        size = tuple(parameter.shape)
        if is_placeholder(parameter):
            size = (parameter.engine.n_experts, parameter.engine.layout.shape.numel)
        for name in () if entry is None else MOMENTS:
            found = tuple(entry[name].shape) if name in entry else "none"
            if found != size or "step" not in entry:
                raise ConfigError(
                    f"the optimizer state of parameter {number} should have a step and {name} "
                    f"of shape {size}, found {found}; load a state that overspill.AdamW saved "
                    "for this model with the same parameter groups"
                )
