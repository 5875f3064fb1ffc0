"""Layers whose experts can be moved to an engine, and checks of them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from overspill.compute.activation import Activation
from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertShape
from overspill.moe.engine import Engine
from overspill.moe.placeholder import ExpertPlaceholder


class ExpertLayer(Protocol):
    """A Mixture-of-Experts layer whose experts can be moved to an engine."""

    shape: ExpertShape
    n_experts: int

    @property
    def experts(self) -> ExpertPlaceholder:
        """Placeholder that `give_away` leaves."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def engine(self) -> Engine | None: ...

    @property
    def trained(self) -> bool:
        """Whether the experts are not frozen. Valid before they are given away."""

    def activation(self) -> Activation | None:
        """Return the function between the two matrices; None for gated SiLU, or GELU without a
        gate. Call it before the experts are given away."""

    def expert_parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters that `give_away` releases."""

    def fill(self, index: int, record: Tensor, device: torch.device) -> None:
        """Copy the weights of an expert into its flat record. Random weights are drawn on
        `device`."""

    def give_away(self, engine: Engine, layer: int) -> None:
        """Release the parameters and leave a placeholder."""


def check_layers(layers: Mapping[str, ExpertLayer], training: bool) -> None:
    """Raises unless all layers have the same kind and number of experts, of which none are shared
    and, for training, none are frozen in part. The keys are the paths of the layers."""
    owners: dict[int, str] = {}
    first_path, first = next(iter(layers.items()))
    for path, layer in layers.items():
        if layer.engine is not None:
            raise ConfigError("the model is offloaded already; offload it once")
        parameters = layer.expert_parameters()
        for parameter in parameters:
            if owners.setdefault(id(parameter), path) != path:
                raise ConfigError(
                    f"{owners[id(parameter)]} and {path} share their experts: not supported"
                )
        if (layer.shape, layer.n_experts) != (first.shape, first.n_experts):
            raise ConfigError(
                f"{path} has {layer.n_experts} experts of {layer.shape}, {first_path} has "
                f"{first.n_experts} of {first.shape}: layers with different experts are not "
                "supported"
            )
        dtypes = {parameter.dtype for parameter in parameters}
        if dtypes != {first.dtype}:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ConfigError(
                f"{path} has experts of {names}, {first_path} of {first.dtype}; convert them to "
                "one data type"
            )
        if training and len({parameter.requires_grad for parameter in parameters}) > 1:
            raise ConfigError(
                f"{path} has experts of which some parameters are frozen and others are not; "
                "freeze all of a layer's experts or none"
            )
    if training and first.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"experts of {first.dtype} cannot be trained; give dtype='bfloat16' or 'float32' to "
            "overspill.load (or convert the model before overspill.offload), or load it for "
            "inference: train=False (or model.eval() before overspill.offload)"
        )


def check_weights(model: nn.Module, drawn: Collection[nn.Parameter] = ()) -> None:
    """Raises if a tensor other than the parameters `drawn` has no weights."""
    ids = {id(parameter) for parameter in drawn}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and id(tensor) not in ids:
            raise ConfigError(
                f"{name} is on the meta device and has no weights (made there, or left on disk by "
                "a device_map); create the model on the CPU, or give its folder to overspill.load"
            )
