"""Checks of the arguments and the input of a `MoELayer`."""

import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.compute.activation import activation_named
from overspill.core.errors import ConfigError
from overspill.plan.reuse import strategy_named

MOST_PARTITIONS = 64
"""Each costs launches in forward and backward; the search tries up to 8."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SEEDS = -(2**63), 2**64 - 1
"""The first and last of torch.Generator."""


@dataclass(frozen=True)
class Arguments:
    """All that must be the same on all ranks."""

    d_model: int
    d_hidden: int
    num_experts: int
    top_k: int
    pipeline: bool
    memory_reuse: bool
    activation: str
    gated: bool
    partitions: int | None
    strategy: str | None
    exchange: str
    """The name of its class."""
    dtype: torch.dtype | None
    device: str
    """The type of the exchange."""
    seed: int | None

    def check(self) -> None:
        """Raise ConfigError for what no layer can have."""
        for name in ("d_model", "d_hidden", "num_experts", "top_k", "partitions"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value >= 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}")
        self._check_pipeline()
        activation_named(self.activation, self.gated)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype} must be one of {', '.join(map(str, DTYPES))}")
        first, last = _SEEDS
        if self.seed is not None and not (_is_number(self.seed) and first <= self.seed <= last):
            raise ConfigError(f"seed={self.seed!r} must be a whole number of 64 bits, or None")

    def _check_pipeline(self) -> None:
        if self.partitions is not None and self.partitions > MOST_PARTITIONS:
            raise ConfigError(
                f"partitions={self.partitions} exceeds {MOST_PARTITIONS}: each takes launches, "
                "which cost more than they hide; leave it out to let the layer find the number"
            )
        if not self.pipeline and self.partitions not in (None, 1):
            raise ConfigError(f"partitions={self.partitions} needs pipeline=True")
        if self.strategy is not None:
            strategy_named(self.strategy)
        if not self.memory_reuse and self.strategy not in (None, "none"):
            raise ConfigError(f"strategy={self.strategy!r} needs memory_reuse=True")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def device_type(device: torch.device | str | None) -> str:
    """The type of the parameters' device; None: torch's default device."""
    return (torch.get_default_device() if device is None else torch.device(device)).type


def check_shape(x: Tensor, d_model: int) -> None:
    if x.shape[-1:] != (d_model,):
        raise ConfigError(
            f"the input has the shape {tuple(x.shape)}; its last dimension must be "
            f"d_model={d_model}"
        )
    if x.is_meta:
        raise ConfigError(
            "a MoELayer cannot compute on the meta device; call to_empty(device=...) and "
            "reset_parameters(), and give it an input there"
        )


def check_type(x_TD: Tensor, w_in: Tensor) -> None:
    if x_TD.dtype not in DTYPES:
        raise ConfigError(
            f"the input is {x_TD.dtype}; convert it to one of {', '.join(map(str, DTYPES))}"
        )
    if x_TD.dtype != w_in.dtype or x_TD.device != w_in.device:
        raise ConfigError(
            f"the input is {x_TD.dtype} on {x_TD.device}, the experts are {w_in.dtype} on "
            f"{w_in.device}; convert one of them, or use torch.autocast"
        )
