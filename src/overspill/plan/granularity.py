"""How many partitions the tokens of a batch are divided into: the online search of MPipeMoE
(Algorithm 1).

The best number of partitions is assumed to grow with the batch. Batch sizes therefore form
disjoint ranges, one for each number, and only batches between two ranges need trials.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from overspill.core.errors import ConfigError

CANDIDATES = (1, 2, 4, 8)
_PASSES = 3
"""Passes with each number of partitions that remains a candidate."""
_FAR = (1.25, 1.05)
"""A number is dropped after one or two passes that take this many times as long as the fastest."""


@dataclass
class _Range:
    """Batch sizes, both inclusive."""

    lower: int
    upper: int


@dataclass
class _Trials:
    """Measured passes of one batch size."""

    warm: bool = False
    seconds: dict[int, list[float]] = field(default_factory=dict)


class GranularitySearch:
    """Chooses the number of partitions for each batch size and learns from measured passes.

    Trials are passes of the training, so no pass is repeated. The choice depends on reports alone:
    ranks with the same reports choose the same.
    """

    def __init__(self, candidates: Sequence[int] = CANDIDATES) -> None:
        if not candidates or min(candidates) < 1 or len({*candidates}) < len(candidates):
            raise ConfigError(
                f"candidates {list(candidates)} must be different numbers of partitions, at least 1"
            )
        self.candidates = tuple(sorted(candidates))
        self._ranges: dict[int, _Range] = {}
        self._cache: dict[int, int] = {}
        self._trials: dict[int, _Trials] = {}

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        """The batch sizes (first, last) for which each number of partitions is known to be best."""
        return {n: (found.lower, found.upper) for n, found in sorted(self._ranges.items())}

    def settled(self, batch: int) -> int | None:
        """The best number of partitions; None if it needs trials."""
        if batch in self._cache:
            return self._cache[batch]
        for n, found in self._ranges.items():
            if found.lower <= batch <= found.upper:
                self._cache[batch] = n
                return n
        possible = self._possible(batch)
        return self._settle(batch, possible[0]) if len(possible) == 1 else None

    def choose(self, batch: int) -> int:
        """The number of partitions for the next pass: the best one, or one to be measured."""
        best = self.settled(batch)
        if best is not None:
            return best
        wanted = self._wanted(batch)
        if not wanted:  # ranges have grown meanwhile: what was measured is enough
            return self._settle(batch, self._fastest(batch))
        seconds = self._of(batch).seconds
        return min(wanted, key=lambda n: len(seconds.get(n, ())))

    def guess(self, batch: int) -> int:
        """A number of partitions for a pass that is not measured."""
        possible = self._possible(batch)
        return self.settled(batch) or possible[len(possible) // 2]

    def report(self, batch: int, n: int, seconds: float) -> None:
        """A forward and backward with `n` partitions took `seconds`: the longest over ranks."""
        if batch in self._cache or n not in self.candidates:
            return
        trials = self._of(batch)
        if not trials.warm:  # the first pass also compiles kernels and allocates memory
            trials.warm = True
            return
        trials.seconds.setdefault(n, []).append(seconds)
        if not self._wanted(batch):
            self._settle(batch, self._fastest(batch))

    def _of(self, batch: int) -> _Trials:
        return self._trials.setdefault(batch, _Trials())

    def _possible(self, batch: int) -> list[int]:
        """Numbers between those of the neighbouring ranges, and at most one for each token."""
        least = max((n for n, r in self._ranges.items() if r.upper < batch), default=0)
        most = min((n for n, r in self._ranges.items() if r.lower > batch), default=None)
        usable = [n for n in self.candidates if n <= max(1, batch)] or [self.candidates[0]]
        return [n for n in usable if n >= least and (most is None or n <= most)] or [usable[-1]]

    def _wanted(self, batch: int) -> list[int]:
        """Numbers that need more passes. A larger number is tried only if the one before it is the
        fastest so far: times are assumed to fall, then to rise, and many partitions of a small
        batch take several times as long. The shortest pass with a number counts: whatever else the
        host does makes passes longer, never shorter."""
        seconds, wanted = self._of(batch).seconds, []
        shortest = {n: min(found) for n, found in seconds.items()}
        best, so_far = min(shortest.values(), default=float("inf")), float("inf")
        for n in self._possible(batch):
            found = seconds.get(n, [])
            if len(found) < _PASSES and not _is_far(found, best):
                wanted.append(n)
            if not found or shortest[n] > so_far:
                break
            so_far = shortest[n]
        return wanted

    def _fastest(self, batch: int) -> int:
        seconds = self._of(batch).seconds
        possible = self._possible(batch)
        measured = [n for n in possible if n in seconds] or possible
        return min(measured, key=lambda n: (min(seconds.get(n, [0.0])), n))

    def _settle(self, batch: int, n: int) -> int:
        found = self._ranges.setdefault(n, _Range(batch, batch))
        found.lower, found.upper = min(found.lower, batch), max(found.upper, batch)
        self._cache[batch] = n
        self._trials.pop(batch, None)
        return n


def _is_far(seconds: Sequence[float], best: float) -> bool:
    return bool(seconds) and min(seconds) > best * _FAR[min(len(seconds), len(_FAR)) - 1]
