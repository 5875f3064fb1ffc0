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
_FAR = (1.5, 1.1)
"""A number is dropped after its first pass, or after its second one, if that takes this many times
as long as the best. The first pass with a batch, whose time is not used, is one of them."""
_LOADS = 2.0
"""A first pass for which the host takes this many times as long as expected loads kernels."""
_WORTH = 0.98
"""The next larger number is tried if a number takes at most this share of the time of smaller ones:
each doubling saves less than the one before."""
_SEEN = 1.03
"""Numbers are compared by the time of whole steps if it differs by more than this."""
_LEAST = 0.65
"""A further partition takes the host at least this share of what the first one has taken."""


@dataclass
class _Range:
    """Batch sizes, both inclusive."""

    lower: int
    upper: int


@dataclass(frozen=True)
class PassTime:
    """Seconds of a forward and backward; over ranks, the longest of each."""

    device: float
    host: float = 0.0
    """What the host needed to queue it; 0 if it computes itself."""
    partitions: float = 0.0
    """Of these, what it needed for all partitions."""
    step: float = 0.0
    """From the begin of routing to the next pass through the layer, or to the end of the backward
    on the device; 0 if it is not known."""


@dataclass
class _Trials:
    """Measured passes of one batch size."""

    warm: int | None = None
    """The number of partitions of the first pass, which is not counted."""
    passes: dict[int, list[PassTime]] = field(default_factory=dict)
    last: int | None = None
    """The number of the last pass."""
    loaded: set[int] = field(default_factory=set)
    """Numbers of which a pass is not counted because it has loaded kernels."""

    def add(self, n: int, found: PassTime | None) -> None:
        self.last = n
        if self.warm is None:  # the first pass also compiles kernels and allocates memory
            self.warm = n
        elif found is None:
            return
        elif n not in self.passes and n not in self.loaded and self._loads(n, found):
            self.loaded.add(n)
        else:
            self.passes.setdefault(n, []).append(found)

    def _loads(self, n: int, found: PassTime) -> bool:
        """The host takes at most as long for each further partition as for the first ones."""
        most = [
            n / fewer * min(each.host for each in passes)
            for fewer, passes in self.passes.items()
            if fewer < n
        ]
        return found.host > _LOADS * min(most, default=found.host)

    def seen(self, n: int) -> int:
        """Passes with `n`, also the first one of all, whose time is not used."""
        return len(self.passes.get(n, ())) + (n == self.warm)

    def costs(self, n: int) -> list[float]:
        """What passes are compared by: the time of their steps, if a number changes that. It does
        where the layer is a large part of a model, and shows what a step waits for, the device or
        the host. Else the time on the device."""
        steps = [min(each.step for each in found) for found in self.passes.values()]
        by_step = bool(steps) and max(steps) > _SEEN * min(steps) > 0
        return [each.step if by_step else each.device for each in self.passes.get(n, ())]

    def cost(self, n: int) -> float:
        """The second cheapest pass of three (`_PASSES`), or the cheapest of fewer: the host may do
        something else during a pass, or queue one so early that it looks short."""
        costs = sorted(self.costs(n))
        return costs[len(costs) // 3]

    def is_far(self, n: int, best: float) -> bool:
        """Whether the passes with `n` show that it is not the best."""
        found = self.costs(n)
        return bool(found) and min(found) > best * _FAR[min(self.seen(n), len(_FAR)) - 1]

    def least(self, n: int) -> float:
        """What a pass with `n` partitions takes at least, by the passes with fewer: the device
        waits for what the host has not queued."""
        bounds = [
            found.host + _LEAST * (n - fewer) * found.partitions / fewer
            for fewer, passes in self.passes.items()
            if fewer < n
            for found in [min(passes, key=lambda each: each.host)]
        ]
        return max(bounds, default=0.0)


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
        trials = self._of(batch)
        # the first pass after one with another number takes longer: each has some in a row
        if trials.last in wanted and trials.seen(trials.last) < len(_FAR):
            return trials.last
        return min(wanted, key=lambda n: (trials.seen(n), n != trials.last))

    def guess(self, batch: int) -> int:
        """A number of partitions for a pass that is not measured."""
        possible = self._possible(batch)
        return self.settled(batch) or possible[len(possible) // 2]

    def report(self, batch: int, n: int, found: PassTime | None) -> None:
        """A forward and backward with `n` partitions took so long; None: its time says nothing."""
        if batch in self._cache or n not in self.candidates:
            return
        trials = self._of(batch)
        trials.add(n, found)
        if trials.passes and not self._wanted(batch):
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
        """Numbers that need more passes. A larger number is tried only if the one before it saves
        something: times are assumed to fall, then to rise, and many partitions of a small batch
        take several times as long. It is not tried if the host alone needs longer."""
        trials, wanted = self._of(batch), []
        costs = {n: trials.cost(n) for n in trials.passes}
        best, so_far = min(costs.values(), default=float("inf")), float("inf")
        for n in self._possible(batch):
            if n not in costs and trials.least(n) > best:
                break
            if len(trials.passes.get(n, ())) < _PASSES and not trials.is_far(n, best):
                wanted.append(n)
            if n not in costs or costs[n] > _WORTH * so_far:
                break
            so_far = costs[n]
        return wanted

    def _fastest(self, batch: int) -> int:
        trials, possible = self._of(batch), self._possible(batch)
        measured = [n for n in possible if n in trials.passes]
        return min(measured, key=lambda n: (trials.cost(n), n), default=possible[0])

    def _settle(self, batch: int, n: int) -> int:
        found = self._ranges.setdefault(n, _Range(batch, batch))
        found.lower, found.upper = min(found.lower, batch), max(found.upper, batch)
        self._cache[batch] = n
        self._trials.pop(batch, None)
        return n
