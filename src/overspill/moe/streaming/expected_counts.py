"""Token rows that each expert of a layer is expected to get in its next pass."""

import enum
from collections.abc import Sequence

from overspill.core.experts import Phase
from overspill.plan.popularity import RowErrors

_DECAY = 0.5
"""Weight of a pass relative to the one after it."""


class CountSource(enum.Enum):
    """Source of expected counts."""

    HISTORY = "by history"
    PREDICTION = "by prediction"
    ROUTING = "by routing"


class ExpectedCounts:
    """Counts from the last passes, from the popularity predictor where it has lately been closer,
    or from pre-gates; in backward those of the forward's routing."""

    def __init__(self, n_layers: int) -> None:
        self._routed: list[tuple[float, ...] | None] = [None] * n_layers
        self._history: list[tuple[float, ...] | None] = [None] * n_layers
        self._hints: list[tuple[float, ...] | None] = [None] * n_layers
        self._predicted: list[tuple[float, ...] | None] = [None] * n_layers
        self._errors = [RowErrors() for _ in range(n_layers)]
        self._wanted = [True] * n_layers  # a prediction for the next forward

    def observe(self, layer: int, counts: Sequence[int]) -> None:
        """Note the routing of a forward."""
        before, predicted = self._history[layer], self._predicted[layer]
        if before is not None and predicted is not None:
            self._errors[layer].note(counts, predicted, before)
        self._wanted[layer] = self._errors[layer].wants_prediction()
        if before is None:
            self._history[layer] = tuple(map(float, counts))
        else:
            pairs = zip(before, counts, strict=True)
            self._history[layer] = tuple(_DECAY * old + (1 - _DECAY) * new for old, new in pairs)
        self._routed[layer] = tuple(counts)
        self._hints[layer] = self._predicted[layer] = None

    def hint(self, layer: int, counts: Sequence[int]) -> None:
        """Set the counts of the next forward, whose routing a pre-gate has chosen."""
        self._hints[layer] = tuple(counts)

    def wants_prediction(self, layer: int) -> bool:
        """Whether a prediction for the next forward is worth its time."""
        return self._wanted[layer]

    def predict(self, layer: int, counts: Sequence[float]) -> None:
        """Set the counts that the popularity predictor expects in the next forward."""
        self._predicted[layer] = tuple(counts)

    def forget_hints(self) -> None:
        """Drop hints and predictions: their forward does not come."""
        self._hints = [None] * len(self._hints)
        self._predicted = [None] * len(self._predicted)

    def swap(self, layer: int, first: int, second: int) -> None:
        """Follow a swap of the experts at two positions."""
        self._routed[layer] = _swapped(self._routed[layer], first, second)
        self._history[layer] = _swapped(self._history[layer], first, second)
        self._hints[layer] = _swapped(self._hints[layer], first, second)
        self._predicted[layer] = _swapped(self._predicted[layer], first, second)

    def expected(
        self, layer: int, phase: Phase
    ) -> tuple[Sequence[int] | Sequence[float] | None, CountSource]:
        """The counts of the next pass through the layer; None if nothing is known."""
        if phase is Phase.BACKWARD:
            return self._routed[layer], CountSource.ROUTING
        if self._hints[layer] is not None:
            return self._hints[layer], CountSource.ROUTING
        if self._predicted[layer] is not None and self._errors[layer].prefers_prediction:
            return self._predicted[layer], CountSource.PREDICTION
        return self._history[layer], CountSource.HISTORY


def _swapped(counts: tuple[float, ...] | None, first: int, second: int) -> tuple[float, ...] | None:
    if counts is None:
        return None
    changed = list(counts)
    changed[first], changed[second] = changed[second], changed[first]
    return tuple(changed)
