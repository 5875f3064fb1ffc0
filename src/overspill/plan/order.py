"""The order in which a step visits the layers. It is known, so transfers can run ahead."""

from collections.abc import Iterator
from dataclasses import dataclass

from overspill.core.experts import Phase


@dataclass(frozen=True)
class Position:
    """A layer in forward or backward."""

    layer: int
    phase: Phase


def upcoming(here: Position, n_layers: int, training: bool) -> Iterator[Position]:
    """`here` and the positions after it: the rest of forward, backward if `training`, then the next
    forward. No plan looks further ahead."""
    for layer in range(here.layer, n_layers) if here.phase is Phase.FORWARD else ():
        yield Position(layer, Phase.FORWARD)
    if here.phase is Phase.BACKWARD or training:
        top = here.layer if here.phase is Phase.BACKWARD else n_layers - 1
        for layer in range(top, -1, -1):
            yield Position(layer, Phase.BACKWARD)
    for layer in range(n_layers):
        yield Position(layer, Phase.FORWARD)
