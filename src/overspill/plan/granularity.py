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
"""Counted passes with each number of partitions that remains a candidate."""
_FAR = (1.15, 1.1)
"""A number is dropped after its first counted pass, or after the second one, if its best takes this
many times as long as that of the fastest number."""
_PROMISING = 0.75
"""A number is promising if the host needs at most this share of the time of the fastest one."""
_LARGE_PART = 2.5
"""Steps of a model of which the layer is a large part take less than so many times what the host
needs for the layer."""
_MORE = 4
"""Times of a batch tell what up to so many times as many tokens take."""
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

    passes: dict[int, list[PassTime]] = field(default_factory=dict)
    """Without the first pass after one with another number: it takes longer, and it may load
    kernels and allocate memory."""
    last: int | None = None
    """The number of the last pass that was reported."""
    counts: bool = False
    """Whether that pass is counted."""
    chosen: int | None = None
    more: int = 0
    """For so many further passes this number is chosen whatever is reported: the device need not
    wait for the host to decide."""

    def add(self, n: int, found: PassTime | None) -> None:
        self.counts = found is not None and n == self.last
        self.last = n
        if found is not None and self.counts:
            self.passes.setdefault(n, []).append(found)

    def counted(self, n: int) -> int:
        return len(self.passes.get(n, ()))

    def choose(self, n: int) -> int:
        """For two passes, of which one is counted; three with a number that was measured before;
        one more with the same number."""
        self.more = 0 if n == self.chosen else 2 if n in self.passes else 1
        self.chosen = n
        return n

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

    def agree(self, n: int) -> bool:
        """Whether two passes with `n` took about the same time."""
        costs = sorted(self.costs(n))
        return len(costs) > 1 and costs[1] < _FAR[0] * costs[0]

    def is_far(self, n: int, best: float) -> bool:
        """Whether the passes with `n` show that it is not the best."""
        found = self.costs(n)
        return bool(found) and min(found) > best * _FAR[min(len(found), len(_FAR)) - 1]

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
        self._known: dict[int, dict[int, PassTime]] = {}  # by batch and number

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
        trials = self._of(batch)
        if trials.chosen is not None and trials.more > 0:
            trials.more -= 1
            return trials.chosen
        wanted = self._wanted(batch)
        if not wanted:  # ranges have grown meanwhile: what was measured is enough
            return self._settle(batch, self._fastest(batch))
        return trials.choose(self._next(batch, wanted))

    def _next(self, batch: int, wanted: list[int]) -> int:
        """A number without a counted pass, or one with the fewest. But the fastest so far first
        has two if no other is promising: to come back to it takes a pass more."""
        trials, fastest = self._of(batch), self._fastest(batch)
        new = [n for n in wanted if n not in trials.passes]
        if fastest in wanted and fastest == trials.last and trials.counted(fastest) == 1:
            limit = _PROMISING * trials.cost(fastest)
            if not any(trials.least(n) < limit for n in new):
                return fastest
        return min(new or wanted, key=lambda n: (n != trials.last, trials.counted(n)))

    def depends_on_report(self, batch: int) -> bool:
        """Whether the next choice depends on the last pass."""
        return self._of(batch).more == 0

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
        if trials.counts and not self._wanted(batch):
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
        take several times as long. It is not tried if the host alone needs longer, and a number is
        not tried that a smaller batch shows to be slow."""
        trials, wanted = self._of(batch), []
        if not trials.passes:
            return [self._first(batch)]
        costs = {n: trials.cost(n) for n in trials.passes}
        best, so_far = min(costs.values()), float("inf")
        for n in self._possible(batch):
            if n not in costs and self._is_slow(batch, n):
                continue
            if n not in costs and (trials.least(n) > best or self._is_queued_late(batch, n)):
                break
            if trials.counted(n) < _PASSES and not trials.is_far(n, best):
                wanted.append(n)
            if n not in costs or costs[n] > _WORTH * so_far:
                break
            so_far = costs[n]
        alone = wanted == [self._fastest(batch)]
        return [] if alone and trials.agree(wanted[0]) else wanted

    def _smaller(self, batch: int) -> tuple[float, dict[int, PassTime]]:
        """The passes of the next smaller batch, and how many times larger this one is, which is
        also how many times longer the device takes."""
        smaller = max((known for known in self._known if known < batch), default=0)
        if batch > _MORE * smaller:
            return 0.0, {}
        possible = self._possible(batch)
        found = {n: each for n, each in self._known[smaller].items() if n in possible}
        return batch / smaller, found

    def _first(self, batch: int) -> int:
        """The number to begin with: the one that is expected to be the fastest, or the next one if
        that is promising."""
        possible = self._possible(batch)
        times, found = self._smaller(batch)
        expected = {n: max(times * each.device, each.host) for n, each in found.items()}
        if not expected:
            return possible[0]
        first = min(expected, key=lambda n: expected[n])
        after = [n for n in possible if n > first][:1]
        limit = _PROMISING * expected[first]
        promising = [n for n in after if 0 < self._least_step(batch, n) < limit]
        return promising[0] if promising and promising[0] not in expected else first

    def _least_step(self, batch: int, n: int) -> float:
        """What a step takes at least, by smaller batches: where the device waited for the host, as
        long, and what the host needs for more partitions. 0 if it is not known, or if the layer is
        a small part of the step, which may then depend on anything."""
        bounds = [
            found.step + _LEAST * (n - fewer) * found.partitions / fewer
            for smaller, passes in self._known.items()
            for fewer, found in passes.items()
            if smaller < batch and fewer < n and found.device <= found.host
            if found.step < _LARGE_PART * found.host
        ]
        return max(bounds, default=0.0)

    def _is_queued_late(self, batch: int, n: int) -> bool:
        """Whether steps with a number take longer than those that were measured."""
        steps = [each.step for found in self._of(batch).passes.values() for each in found]
        return 0 < min(steps) < self._least_step(batch, n)

    def _is_slow(self, batch: int, n: int) -> bool:
        """Whether a smaller batch, for which the device did not wait for the host, shows that a
        number takes longer than one that was tried."""
        times, found = self._smaller(batch)
        if n not in found or found[n].device < found[n].host:
            return False
        passes = [each.device for tried in self._of(batch).passes.values() for each in tried]
        return times * found[n].device > _FAR[0] * min(passes)

    def _fastest(self, batch: int) -> int:
        trials, possible = self._of(batch), self._possible(batch)
        measured = [n for n in possible if n in trials.passes]
        return min(measured, key=lambda n: (trials.cost(n), n), default=possible[0])

    def _settle(self, batch: int, n: int) -> int:
        found = self._ranges.setdefault(n, _Range(batch, batch))
        found.lower, found.upper = min(found.lower, batch), max(found.upper, batch)
        self._cache[batch] = n
        trials = self._trials.pop(batch, _Trials())
        if trials.passes:
            self._known[batch] = {
                tried: min(passes, key=lambda each: each.step or each.device)
                for tried, passes in trials.passes.items()
            }
        return n
