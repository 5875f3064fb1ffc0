"""Modes of decoding with experts that are not on the device: one small class for each mode.

A mode names experts of a later layer ahead, as in the comparison of the paper on pre-gated MoE.
With `on_cpu`, the CPU loads them into its caches and computes missing experts; otherwise the device
copies them, and reads other experts when it needs them. The setting `migrate` decides that; by
default the mode does.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.serve.options import DecodingOptions


class Ahead(NamedTuple):
    """Experts of a later layer that are expected to be needed."""

    layer: int
    ids_BK: Tensor | None
    """Ids of the experts; None for all experts of the layer."""


class Routings(Protocol):
    """Known and predicted routing of later layers, once a layer of a step has its experts."""

    n_layers: int
    level: int
    """Level of the pre-gates: by how many layers they are computed earlier; 0 without pre-gates."""

    def known(self, layer: int) -> Tensor | None:
        """Return the ids of experts that a pre-gate has chosen already, [B, K]."""

    def guess(self, layer: int) -> Tensor | None:
        """Return the ids of experts that the gate of a later layer chooses for the input of the
        current layer, or that the popularity predictor names; None if the step has no use for
        them."""


class Mode(ABC):
    """Choice of the experts that are loaded ahead, and of the processor for missing experts."""

    copies_all = False
    """Whether all experts of a layer are copied at once."""

    def __init__(self, on_cpu: bool) -> None:
        """With `on_cpu` the CPU computes missing experts; otherwise the device reads them in host
        memory."""
        self.on_cpu = on_cpu

    @abstractmethod
    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        """Return the experts that are copied to the device, loaded or read from disk while `layer`
        computes."""


class OnDemand(Mode):
    """Names no experts: they are computed or read when the gate has chosen them."""

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        return None


class PrefetchAll(Mode):
    """Names all experts of the next layer."""

    copies_all = True

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        return Ahead(layer + 1, None) if layer + 1 < routings.n_layers else None


class Lookahead(Mode):
    """Names the experts that the gate of the next layer would choose for the input of this one, or
    that the popularity predictor names. Other experts are computed or read on demand."""

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        later = layer + 1
        if later == routings.n_layers:
            return None
        ids = routings.known(later) if 0 < routings.level <= later else None
        if ids is None:
            ids = routings.guess(later)
        return None if ids is None else Ahead(later, ids)


class PreGated(Mode):
    """Names the experts that the pre-gates of this layer have chosen for a later one."""

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        later = layer + routings.level
        if later >= routings.n_layers:
            return None
        ids = routings.known(later)
        return None if ids is None else Ahead(later, ids)


class Auto(PreGated):
    """Names the experts that pre-gates have chosen, if the model has pre-gates: others are not
    known well enough."""

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        return super().ahead(layer, routings) if routings.level else None


_MODES: dict[str, type[Mode]] = {
    "auto": Auto,
    "gpu-only": Auto,  # nothing is missing
    "on-demand": OnDemand,
    "prefetch-all": PrefetchAll,
    "lookahead": Lookahead,
    "pre-gated": PreGated,
}
_BY_RATES = ("auto", "gpu-only", "pre-gated")
"""Modes in which the CPU computes if it reads host memory faster than the device, as with a
predictor that learns; in the others the device reads, as in the paper."""


def check_decoding(decoding: DecodingOptions, device: torch.device) -> None:
    """Raise if settings contradict the mode or the device."""
    mode, migrate, predictor = decoding.mode, decoding.migrate, decoding.predictor
    if predictor is not None and mode != "lookahead":
        raise ConfigError(
            f"predictor={predictor!r} is for mode='lookahead', and the mode is {mode!r}; leave "
            "predictor out (--predictor), or choose that mode"
        )
    if migrate != "auto" and mode == "gpu-only":
        raise ConfigError(
            f"migrate={migrate!r} is for experts in host memory, and mode='gpu-only' has none "
            "there; leave migrate out or choose another mode"
        )
    if migrate == "copy" and device.type != "cuda":
        raise ConfigError(
            f"migrate='copy' copies experts to a GPU, and this model is computed on {device}; "
            "leave migrate out, or use a GPU"
        )


def new_mode(decoding: DecodingOptions, level: int, cpu_is_faster: bool = True) -> Mode:
    """Return the mode for a model with pre-gates of this level. `cpu_is_faster` says whether the
    CPU reads host memory faster than the device does."""
    if decoding.mode == "pre-gated" and not level:
        raise ConfigError(
            "mode='pre-gated' needs a model with pre-gates; train them with overspill pregate, or "
            "choose another mode"
        )
    by_default = cpu_is_faster and (decoding.mode in _BY_RATES or decoding.learns)
    migrate = decoding.migrate
    return _MODES[decoding.mode](by_default if migrate == "auto" else migrate == "cpu")
