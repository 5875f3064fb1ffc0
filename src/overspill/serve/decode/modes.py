"""What decoding steps do about experts that are not on the device: one small class for a mode.

`auto` lets the CPU compute them. The others copy them to the device, as the modes that the paper on
pre-gated MoE compares: after the gate has chosen them, or earlier, while other layers compute.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from overspill.core.errors import ConfigError


class Ahead(NamedTuple):
    """Experts of a later layer that will be needed."""

    layer: int
    ids_BK: Tensor | None  # all, if None


class Routings(Protocol):
    """What is known of the routing of a step when a layer has chosen its experts."""

    n_layers: int
    level: int  # of the pre-gates; 0: there are none

    def known(self, layer: int) -> Tensor | None:
        """The ids of experts that a pre-gate has chosen already, [B, K]."""

    def guess(self, layer: int) -> Tensor:
        """Those that the gate of another layer chooses for the input of the current one."""


class Mode(Protocol):
    on_cpu: bool
    """The CPU computes what is missing; else the device reads it from host memory."""
    copies_all: bool
    """All experts of a layer are copied at once."""

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        """What is copied to the device, or read from disk, while `layer` computes."""


class Auto:
    """The CPU computes missing experts where they are, or the device reads them, whichever reads
    host memory faster. Only what pre-gates have chosen is known well enough to act on it ahead."""

    copies_all = False

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        return PreGated(self.on_cpu).ahead(layer, routings) if routings.level else None


class OnDemand:
    """Nothing is copied before the gate has chosen it."""

    on_cpu = False
    copies_all = False

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        return None


class PrefetchAll:
    """All experts of the next layer."""

    on_cpu = False
    copies_all = True

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        return Ahead(layer + 1, None) if layer + 1 < routings.n_layers else None


class Lookahead:
    """Those experts of the next layer that its gate would choose for the input of this one. What it
    did not choose is copied on demand."""

    on_cpu = False
    copies_all = False

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        later = layer + 1
        if later == routings.n_layers:
            return None
        ids = routings.known(later) if 0 < routings.level <= later else None
        return Ahead(later, routings.guess(later) if ids is None else ids)


class PreGated:
    """Those that the pre-gates of this layer have chosen for a later one. They are handed to the
    CPU or copied, whichever reads them faster from host memory."""

    copies_all = False

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu

    def ahead(self, layer: int, routings: Routings) -> Ahead | None:
        later = layer + routings.level
        if later >= routings.n_layers:
            return None
        ids = routings.known(later)
        return None if ids is None else Ahead(later, ids)


_MODES: dict[str, Callable[[bool], Mode]] = {  # whether the CPU reads host memory faster
    "auto": Auto,
    "gpu-only": Auto,  # nothing is missing
    "on-demand": lambda _: OnDemand(),
    "prefetch-all": lambda _: PrefetchAll(),
    "lookahead": lambda _: Lookahead(),
    "pre-gated": PreGated,
}


def check_mode(name: str) -> None:
    if name not in _MODES:
        raise ConfigError(f"mode={name!r} must be one of {', '.join(map(repr, _MODES))}")


def new_mode(name: str, level: int, cpu_is_faster: bool = True) -> Mode:
    """The mode of that name for a model with pre-gates of this level, on a machine whose CPU reads
    host memory faster than the device does, or not."""
    check_mode(name)
    if name == "pre-gated" and not level:
        raise ConfigError(
            "mode='pre-gated' needs a model with pre-gates; train them with overspill pregate, or "
            "choose another mode"
        )
    return _MODES[name](cpu_is_faster)
