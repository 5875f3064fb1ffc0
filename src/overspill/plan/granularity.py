"""The number of partitions that the tokens of a batch are divided into: the online search of
MPipeMoE (Algorithm 1).

The best number of partitions is assumed to grow with the batch. Batch sizes therefore form
disjoint ranges, one for each number, and only batches between two ranges need trials. Trials are
passes of the training, so no pass is repeated.
"""

import statistics

CANDIDATES = (1, 2, 4, 8)
_PASSES = 3
"""Counted passes with a number, after one that may load kernels and allocate memory."""
_WORTH = 0.98
"""The next larger number is tried if a number takes at most this share of the time of smaller ones:
each doubling saves less than the one before."""


class GranularitySearch:
    """The number of partitions for each batch size, learned from the times of passes. It depends on
    reports alone: ranks with the same reports choose the same."""

    def __init__(self) -> None:
        self.ranges: dict[int, tuple[int, int]] = {}
        """S of the paper: the first and last batch size for which each number is known to be the
        best."""
        self._best: dict[int, int] = {}  # the paper's cache_table, by batch
        self._seconds: dict[int, dict[int, list[float]]] = {}  # of trials, by batch and number

    def settled(self, batch: int) -> int | None:
        """The best number of partitions; None if it needs trials."""
        if batch not in self._best and len(possible := self._possible(batch)) == 1:
            self._settle(batch, possible[0])
        return self._best.get(batch)

    def choose(self, batch: int) -> int:
        """The number of partitions for the next pass: the best one, or one to be measured."""
        if self.settled(batch) is None and (wanted := self._wanted(batch)) is not None:
            return wanted
        return self._best.get(batch) or self._settle(batch, self._fastest(batch))

    def guess(self, batch: int) -> int:
        """A number of partitions for a pass that is not measured."""
        possible = self._possible(batch)
        return self.settled(batch) or possible[len(possible) // 2]

    def report(self, batch: int, n: int, seconds: float) -> None:
        """A forward and backward with `n` partitions took so long; over ranks, the longest."""
        if batch not in self._best and n in CANDIDATES:
            self._seconds.setdefault(batch, {}).setdefault(n, []).append(seconds)
            if self._wanted(batch) is None:
                self._settle(batch, self._fastest(batch))

    def _possible(self, batch: int) -> list[int]:
        """Numbers from that of the range below to that of the range above, and at most one for each
        token. One number if the batch is within a range."""
        least = max((n for n, (first, _) in self.ranges.items() if first <= batch), default=1)
        most = min((n for n, (_, last) in self.ranges.items() if last >= batch), default=batch)
        return [n for n in CANDIDATES if least <= n <= max(1, min(most, batch))]

    def _wanted(self, batch: int) -> int | None:
        """searchBestGran: the number for the next trial; None if the best is known. Times are
        assumed to fall with the number, then to rise, and many partitions of a small batch take
        several times as long: numbers are tried in ascending order, until one saves nothing."""
        so_far = float("inf")
        for n in self._possible(batch):
            if len(self._seconds.get(batch, {}).get(n, ())) <= _PASSES:
                return n
            if self._cost(batch, n) > _WORTH * so_far:
                break
            so_far = self._cost(batch, n)
        return None

    def _cost(self, batch: int, n: int) -> float:
        """The median of counted passes: in one of them the host may have done something else."""
        return statistics.median(self._seconds[batch][n][1:])

    def _fastest(self, batch: int) -> int:
        measured = self._seconds.get(batch, {})
        complete = [n for n in self._possible(batch) if len(measured.get(n, ())) > _PASSES]
        return min(complete, key=lambda n: self._cost(batch, n))

    def _settle(self, batch: int, n: int) -> int:
        """Add the batch to the range of its best number."""
        first, last = self.ranges.get(n, (batch, batch))
        self.ranges[n] = min(first, batch), max(last, batch)
        self._best[batch] = n
        self._seconds.pop(batch, None)
        return n
