"""How often each expert is used."""

from collections.abc import Sequence

from overspill.plan.usage import Exchange, exchanges

_WINDOW = 128
"""At twice as many passes all numbers are halved: later passes count more than earlier ones."""
_PERIOD = 8
"""Passes through the model from one decision to the next."""


class Usage:
    """Passes in which the expert at each position of a layer had tokens. Used under the store's
    lock."""

    def __init__(self, n_layers: int, n_local: int) -> None:
        self._passes = [0] * n_layers
        self._uses = [[0] * n_local for _ in range(n_layers)]
        self._since = 0  # passes since the last decision

    def observe(self, layer: int, counts: Sequence[int]) -> None:
        """A forward through a layer, with the token rows of each expert."""
        uses = self._uses[layer]
        for position, count in enumerate(counts):
            if count:
                uses[position] += 1
        self._passes[layer] += 1
        self._since += layer == 0
        if self._passes[layer] >= 2 * _WINDOW:
            self._passes[layer] //= 2
            self._uses[layer] = [number // 2 for number in uses]

    def exchange(self, layer: int, first: int, second: int) -> None:
        """The experts at two positions have exchanged places."""
        uses = self._uses[layer]
        uses[first], uses[second] = uses[second], uses[first]

    def decide(self, homes: Sequence[int], most: int) -> list[Exchange]:
        """Exchanges that are worthwhile now, at most `most`; none if it was asked recently."""
        if self._since < _PERIOD:
            return []
        self._since = 0
        return exchanges(self._passes, self._uses, homes, most)
