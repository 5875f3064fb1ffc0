"""The order in which a step visits the layers. It is known, so transfers can run ahead."""

from collections.abc import Iterator
from dataclasses import dataclass

from overspill.core.experts import Phase


@dataclass(frozen=True)
class Position:
    """A layer in forward or backward."""

    layer: int
    phase: Phase


@dataclass(frozen=True)
class StageVisit:
    """A micro-batch in a stage, the layers [first, stop): all micro-batches pass a stage before the
    next one."""

    first: int
    stop: int
    micro_batch: int
    micro_batches: int
    turns: bool
    """Whether the backward of each micro-batch follows its forward: the last stage."""

    @property
    def more(self) -> bool:
        """Whether other micro-batches pass the stage after this one."""
        return self.micro_batch + 1 < self.micro_batches

    def passes(self, phase: Phase) -> int:
        """Passes through a layer of the stage, from one in this direction on, before those of
        another stage."""
        each = 2 if self.turns else 1
        return each * (self.micro_batches - self.micro_batch) - (
            1 if self.turns and phase is Phase.BACKWARD else 0
        )

    def returns(self, layer: int, here: Position) -> bool:
        """Whether the next pass through `layer` has the direction of the current one, although the
        current one is past that layer."""
        inside = self.first <= layer < self.stop
        return self.more and inside and not self.turns and layer != here.layer


def upcoming(
    here: Position, n_layers: int, training: bool, visit: StageVisit | None = None
) -> Iterator[Position]:
    """`here` and the positions after it: the rest of forward, backward if `training`, then the next
    forward. No plan looks further ahead. In stages other micro-batches follow, also through
    `here`."""
    if visit is not None and visit.first <= here.layer < visit.stop:
        yield from _upcoming_in_stages(here, n_layers, training, visit)
        return
    for layer in range(here.layer, n_layers) if here.phase is Phase.FORWARD else ():
        yield Position(layer, Phase.FORWARD)
    if here.phase is Phase.BACKWARD or training:
        top = here.layer if here.phase is Phase.BACKWARD else n_layers - 1
        for layer in range(top, -1, -1):
            yield Position(layer, Phase.BACKWARD)
    for layer in range(n_layers):
        yield Position(layer, Phase.FORWARD)


def _upcoming_in_stages(
    here: Position, n_layers: int, training: bool, visit: StageVisit
) -> Iterator[Position]:
    def forward(first: int, stop: int) -> Iterator[Position]:
        return (Position(layer, Phase.FORWARD) for layer in range(first, stop))

    def backward(stop: int, first: int) -> Iterator[Position]:
        return (Position(layer, Phase.BACKWARD) for layer in range(stop - 1, first - 1, -1))

    first, stop, layer = visit.first, visit.stop, here.layer
    if here.phase is Phase.FORWARD:
        yield from forward(layer, stop)
        if visit.turns:
            yield from backward(stop, first)
        if visit.more:  # the layers that this micro-batch has passed, and this one
            yield from forward(first, layer + 1)
        if not visit.turns:
            yield from forward(stop, n_layers)
            yield from backward(n_layers, first) if training else ()
    else:
        yield from backward(layer + 1, first)
        if visit.more and visit.turns:
            yield from forward(first, stop)
        if visit.more:
            yield from backward(stop, layer)
    if training or here.phase is Phase.BACKWARD:
        yield from backward(first, 0)
    yield from forward(0, n_layers)
