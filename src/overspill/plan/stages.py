"""Pipeline stages: which blocks of a model each has."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from overspill.core.errors import ConfigError


class BlockCost(NamedTuple):
    """What a block of a model needs."""

    seconds: float
    """To compute it, or to bring its experts to the device if that takes longer."""
    nbytes: int
    """Of its weights."""


def divide_blocks(costs: Sequence[BlockCost], n_stages: int) -> list[range]:
    """The blocks of each stage: runs of neighbours whose largest time is as small as possible, then
    whose largest memory is, then with the longer ones first."""
    count = len(costs)
    if not 1 <= n_stages <= count:
        raise ConfigError(
            f"{n_stages} stages need as many blocks, and the model has {count}; give 1 to {count}"
        )
    # best[n]: the largest cost of the first n blocks in the stages so far, and where these end
    best: list[tuple[float, int, tuple[int, ...]] | None] = [None] * (count + 1)
    best[0] = (0.0, 0, ())
    for _ in range(n_stages):
        following: list[tuple[float, int, tuple[int, ...]] | None] = [None] * (count + 1)
        for stop in range(1, count + 1):
            seconds, nbytes = 0.0, 0
            for first in range(stop - 1, -1, -1):
                seconds += costs[first].seconds
                nbytes += costs[first].nbytes
                before = best[first]
                if before is None:
                    continue
                largest = max(before[0], seconds), max(before[1], nbytes)
                ends = (*before[2], -stop)  # negative: stages that end later come first
                found = (*largest, ends)
                known = following[stop]
                if known is None or found < known:
                    following[stop] = found
        best = following
    chosen = best[count]
    assert chosen is not None
    borders = [0, *(-end for end in chosen[2])]
    return [range(first, stop) for first, stop in itertools.pairwise(borders)]
