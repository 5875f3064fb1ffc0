"""Pipeline stages: which blocks of a model each has."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from overspill.core.errors import ConfigError


class BlockCost(NamedTuple):
    """Bytes of a block of a model."""

    seconds: float
    """Time to compute it, or to bring its experts to the device if that takes longer."""
    nbytes: int
    """Bytes of its weights."""


class ExpertTimes(NamedTuple):
    """Measured seconds of one expert."""

    row: float
    """Forward and backward of a token row."""
    upload: float
    """All uploads of the expert in a step."""


UNMEASURED = ExpertTimes(row=1.0, upload=0.0)
"""Times are then in proportion to the parameters that a token passes."""
_TOKENS = 16_384  # of a step on one rank; the number is not known when a model is divided


def block_seconds(
    dense: float, layers: int, top_k: int, n_experts: int, times: ExpertTimes, tokens: int = _TOKENS
) -> float:
    """Cost of a step: computing a block with `layers` of experts, or uploading these, whichever
    takes longer. `dense` are its other parameters, as a multiple of those of an expert."""
    rows = tokens * (dense + layers * top_k)
    return max(rows * times.row, layers * n_experts * times.upload)


def check_stages(n_stages: int, n_blocks: int) -> None:
    """Raise unless each stage gets a block."""
    if not 1 <= n_stages <= n_blocks:
        raise ConfigError(
            f"{n_stages} stages need as many blocks, and the model has {n_blocks}; give 1 to "
            f"{n_blocks}"
        )


def divide_blocks(costs: Sequence[BlockCost], n_stages: int) -> list[range]:
    """The blocks of each stage: runs of neighbours whose largest time is as small as possible, then
    whose largest memory is, then with the longer ones first."""
    count = len(costs)
    check_stages(n_stages, count)
    runs = dict(_runs(costs))
    for field in range(len(BlockCost._fields)):  # one after another: each limits the next
        values = {run: cost[field] for run, cost in runs.items()}
        limit = _least_maxima(values, count, n_stages)[n_stages][0]
        runs = {run: cost for run, cost in runs.items() if cost[field] <= limit}
    possible = _least_maxima(dict.fromkeys(runs, 0), count, n_stages)
    chosen, first = [], 0
    for left in range(n_stages - 1, -1, -1):
        stops = range(count, first, -1)  # the longest first
        stop = next(s for s in stops if range(first, s) in runs and possible[left][s] < inf)
        chosen.append(range(first, stop))
        first = stop
    return chosen


def _runs(costs: Sequence[BlockCost]) -> Iterator[tuple[range, BlockCost]]:
    """All runs of neighbours, and what each needs."""
    for first in range(len(costs)):
        seconds, nbytes = 0.0, 0
        for stop in range(first + 1, len(costs) + 1):
            seconds += costs[stop - 1].seconds
            nbytes += costs[stop - 1].nbytes
            yield range(first, stop), BlockCost(seconds, nbytes)


def _least_maxima(values: Mapping[range, float], count: int, n_stages: int) -> list[list[float]]:
    """For each number of stages and first block: the smallest possible maximum of the values of the
    runs that the blocks from there on are divided into; infinity if these runs do not suffice."""
    least = [[inf] * count + [0.0]]  # without stages there are no blocks
    for _ in range(n_stages):
        after, here = least[-1], [inf] * (count + 1)
        for run, value in values.items():
            here[run.start] = min(here[run.start], max(value, after[run.stop]))
        least.append(here)
    return least
