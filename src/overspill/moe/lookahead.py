"""How many tokens each expert of a layer will get, before the layer's router has spoken.

Three levels of knowledge: history (the last passes through the layer), prediction (a predictor
layers ahead, as long as it has been no worse than history), and the real routing, which backward
always has.
"""

import enum
from collections.abc import Sequence

from overspill.core.experts import Phase

_FADE = 0.5
"""What a pass counts for less than the one after it."""


class Knowledge(enum.Enum):
    """Where a number of tokens comes from."""

    HISTORY = "by history"
    PREDICTED = "predicted"
    REAL = "real"


class Popularity:
    """The expected tokens of every expert. Lists are never shared with who gave or asks for them:
    a step's counts must not change under the history."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.n_experts = n_experts
        self._real: list[tuple[int, ...] | None] = [None] * n_layers
        self._history: list[tuple[float, ...] | None] = [None] * n_layers
        self._predicted: list[tuple[int, ...] | None] = [None] * n_layers
        # how far predictions were off lately, beyond what history was: negative if they are better
        self._excess = [0.0] * n_layers

    def observe(self, layer: int, counts: Sequence[int]) -> None:
        """The real routing of a forward; a prediction for it has served."""
        before, predicted = self._history[layer], self._predicted[layer]
        if before is not None and predicted is not None:
            excess = _distance(predicted, counts) - _distance(before, counts)
            self._excess[layer] = _FADE * self._excess[layer] + (1 - _FADE) * excess
        if before is None:
            self._history[layer] = tuple(map(float, counts))
        else:
            pairs = zip(before, counts, strict=True)
            self._history[layer] = tuple(_FADE * old + (1 - _FADE) * new for old, new in pairs)
        self._real[layer] = tuple(counts)
        self._predicted[layer] = None

    def predict(self, layer: int, counts: Sequence[int]) -> None:
        """What a predictor says of the next forward through `layer`."""
        self._predicted[layer] = tuple(counts)

    def expected(
        self, layer: int, phase: Phase
    ) -> tuple[Sequence[int] | Sequence[float] | None, Knowledge]:
        """The tokens of the next pass through the layer; None if nothing is known."""
        if phase is Phase.BACKWARD:
            return self._real[layer], Knowledge.REAL
        predicted = self._predicted[layer]
        if predicted is not None and self._excess[layer] <= 0:
            return predicted, Knowledge.PREDICTED
        return self._history[layer], Knowledge.HISTORY


def _distance(expected: Sequence[float], real: Sequence[int]) -> float:
    """The share of tokens that were expected elsewhere; of those there were, where the numbers
    differ."""
    scale = sum(real) / max(1, sum(expected))
    return sum(abs(a * scale - b) for a, b in zip(expected, real, strict=True)) / max(1, sum(real))
