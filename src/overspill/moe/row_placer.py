"""Assignment of the token rows of a layer to ranks, and its balance."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from overspill.plan.placement import (
    PlacementCosts,
    Rows,
    balance,
    dynamic_rows,
    outbox_slots,
    shared_parts,
    static_rows,
)
from overspill.tiers.shared_experts import SharedExperts

_WINDOW = 256  # passes that are averaged


@dataclass(frozen=True)
class Sharing:
    """Shared memory and costs of ranks that compute experts of each other."""

    shared: SharedExperts
    costs: PlacementCosts  # the same on all ranks


class Balance(NamedTuple):
    """Token rows that ranks computed in the last passes through layers."""

    rows: list[int]
    """Rows of each rank."""
    placed: float
    """The most of a rank over the mean, as mean over passes."""
    static: float
    """The same figure if owners had computed all rows of their experts."""

    def __str__(self) -> str:
        rows = " ".join(f"{count:,}" for count in self.rows)
        return (
            f"token rows of ranks {rows}; the most over the mean {self.placed:.2f} "
            f"(static {self.static:.2f})"
        )


class RowPlacer:
    """Plans each pass, and remembers the last ones. All ranks get the same counts, so they plan the
    same."""

    def __init__(self, n_ranks: int, costs: PlacementCosts | None) -> None:
        """If `costs` is None, owners compute their experts."""
        self._n_ranks = n_ranks
        self._costs = costs
        self._last: deque[tuple[Rows, float, float]] = deque(maxlen=_WINDOW)

    def place(self, tokens_E: Rows) -> Rows:
        """Token rows that each rank computes of each expert, [G, E]."""
        static_GE = static_rows(tokens_E, self._n_ranks)
        rows_GE = static_GE
        if self._costs is not None:
            rows_GE = dynamic_rows(tokens_E, self._n_ranks, self._costs)
            if shared_parts(rows_GE).max() > outbox_slots(len(tokens_E), self._n_ranks):
                rows_GE = static_GE  # there is no memory for so many gradients
        self._last.append((rows_GE.sum(1), balance(rows_GE), balance(static_GE)))
        return rows_GE

    def balance(self) -> Balance | None:
        """The balance of the last passes; None before the first."""
        if not self._last:
            return None
        rows, placed, static = zip(*self._last, strict=True)
        total_G = np.sum(rows, axis=0)
        return Balance(total_G.tolist(), float(np.mean(placed)), float(np.mean(static)))
