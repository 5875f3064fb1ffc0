"""How many token rows each expert of a layer is expected to get in its next pass."""

import enum
from collections.abc import Sequence

from overspill.core.experts import Phase

_DECAY = 0.5
"""Weight of a pass relative to the one after it."""


class CountSource(enum.Enum):
    """Where expected counts come from."""

    HISTORY = "by history"
    ROUTING = "by routing"


class ExpectedCounts:
    """Before a forward the last passes tell what to expect, or pre-gates; backward has the
    forward's routing."""

    def __init__(self, n_layers: int) -> None:
        self._routed: list[tuple[float, ...] | None] = [None] * n_layers
        self._history: list[tuple[float, ...] | None] = [None] * n_layers
        self._announced: list[tuple[float, ...] | None] = [None] * n_layers

    def observe(self, layer: int, counts: Sequence[int]) -> None:
        """The routing of a forward."""
        before = self._history[layer]
        if before is None:
            self._history[layer] = tuple(map(float, counts))
        else:
            pairs = zip(before, counts, strict=True)
            self._history[layer] = tuple(_DECAY * old + (1 - _DECAY) * new for old, new in pairs)
        self._routed[layer] = tuple(counts)
        self._announced[layer] = None

    def announce(self, layer: int, counts: Sequence[int]) -> None:
        """A pre-gate has chosen the routing of the next forward."""
        self._announced[layer] = tuple(counts)

    def forget_announced(self) -> None:
        """That forward does not come."""
        self._announced = [None] * len(self._announced)

    def exchange(self, layer: int, first: int, second: int) -> None:
        """The experts at two positions have exchanged places."""
        self._routed[layer] = _exchanged(self._routed[layer], first, second)
        self._history[layer] = _exchanged(self._history[layer], first, second)
        self._announced[layer] = _exchanged(self._announced[layer], first, second)

    def expected(
        self, layer: int, phase: Phase
    ) -> tuple[Sequence[int] | Sequence[float] | None, CountSource]:
        """The counts of the next pass through the layer; None if nothing is known."""
        if phase is Phase.BACKWARD:
            return self._routed[layer], CountSource.ROUTING
        if self._announced[layer] is not None:
            return self._announced[layer], CountSource.ROUTING
        return self._history[layer], CountSource.HISTORY


def _exchanged(
    counts: tuple[float, ...] | None, first: int, second: int
) -> tuple[float, ...] | None:
    if counts is None:
        return None
    changed = list(counts)
    changed[first], changed[second] = changed[second], changed[first]
    return tuple(changed)
