"""Which blocks each pipeline stage has."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.errors import ConfigError
from overspill.plan.stages import BlockCost, ExpertTimes, block_seconds, divide_blocks

COSTS = st.builds(BlockCost, st.integers(0, 5).map(float), st.integers(0, 5))


def every_division(count: int, n_stages: int) -> list[list[range]]:
    """All divisions, those with the longer stages first."""
    found = []
    for borders in itertools.combinations(range(1, count), n_stages - 1):
        edges = [0, *borders, count]
        found.append([range(first, stop) for first, stop in itertools.pairwise(edges)])
    return found[::-1]


def largest(costs: list[BlockCost], division: list[range]) -> tuple[float, int]:
    """The time of the slowest stage, and the memory of the largest."""
    seconds = max(sum(costs[block].seconds for block in stage) for stage in division)
    return seconds, max(sum(costs[block].nbytes for block in stage) for stage in division)


@given(st.lists(COSTS, min_size=1, max_size=8), st.data())
def test_the_division_is_the_best_of_all(costs: list[BlockCost], data: st.DataObject) -> None:
    n_stages = data.draw(st.integers(1, len(costs)))
    # the first of the best: min keeps the order
    best = min(every_division(len(costs), n_stages), key=lambda each: largest(costs, each))
    assert divide_blocks(costs, n_stages) == best


def test_memory_decides_between_stages_that_take_equally_long() -> None:
    """The last block alone decides the time; the first two stages may take any time below."""
    costs = [BlockCost(1.0, 4), BlockCost(1.0, 4), BlockCost(2.0, 1), BlockCost(9.0, 1)]
    assert divide_blocks(costs, 3) == [range(1), range(1, 3), range(3, 4)]


def test_equal_blocks_are_spread_evenly_with_the_longer_stages_first() -> None:
    sizes = [len(stage) for stage in divide_blocks([BlockCost(0.1, 7)] * 10, 4)]
    assert sizes == [3, 3, 3, 1]  # a stage of three blocks is the slowest in any division


@pytest.mark.parametrize("n_stages", [0, -1, 5])
def test_a_number_of_stages_that_is_impossible_is_refused(n_stages: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{n_stages} stages.*has 4; give 1 to 4"):
        divide_blocks([BlockCost(1.0, 1)] * 4, n_stages)


@pytest.mark.parametrize(
    ("times", "stages"),
    [
        # computing takes longest: a dense block counts as much as a token's experts
        (ExpertTimes(row=1e-6, upload=0.0), [range(4), range(4, 6)]),
        # uploads take longest: dense blocks take no time in comparison
        (ExpertTimes(row=1e-9, upload=1e-3), [range(5), range(5, 6)]),
    ],
)
def test_the_time_of_a_block_is_that_of_computing_or_of_uploads(
    times: ExpertTimes, stages: list[range]
) -> None:
    dense = [block_seconds(1.0, 0, 2, 64, times)] * 4
    moe = [block_seconds(0.1, 1, 2, 64, times)] * 2
    costs = [BlockCost(seconds, 1) for seconds in (*dense, *moe)]
    assert divide_blocks(costs, 2) == stages
