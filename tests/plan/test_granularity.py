"""The search for the number of partitions: what MPipeMoE's Algorithm 1 promises."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.granularity import CANDIDATES, GranularitySearch

BATCHES = st.lists(st.integers(1, 3000), min_size=1, max_size=12)
TIMES = st.fixed_dictionaries({n: st.floats(1e-3, 1.0) for n in CANDIDATES})


def train(search: GranularitySearch, batch: int, seconds: dict[int, float]) -> list[int]:
    """Trials until the best number is known."""
    tried = []
    while search.settled(batch) is None:
        tried.append(search.choose(batch))
        search.report(batch, tried[-1], seconds[tried[-1]])
        assert len(tried) <= 16, "the search does not end"
    return tried


@given(st.lists(st.tuples(st.integers(1, 3000), TIMES), min_size=1, max_size=12))
def test_ranges_are_disjoint_and_grow_with_the_number(
    work: list[tuple[int, dict[int, float]]],
) -> None:
    search = GranularitySearch()
    for batch, seconds in work:
        train(search, batch, seconds)
        assert search.choose(batch) <= batch
    ranges = [search.ranges[n] for n in sorted(search.ranges)]
    for (_, end), (start, _) in itertools.pairwise(ranges):
        assert end < start
    assert all(search.ranges[search.choose(batch)][0] <= batch for batch, _ in work)


@given(BATCHES, TIMES)
def test_ranks_with_the_same_times_choose_the_same(
    batches: list[int], seconds: dict[int, float]
) -> None:
    ranks = [GranularitySearch() for _ in range(3)]
    for batch in [*batches] * 4:
        chosen = {rank.choose(batch) for rank in ranks}
        assert len(chosen) == 1
        (n,) = chosen
        for rank in ranks:
            rank.report(batch, n, seconds[n])


def test_searches_of_several_batches_end_whatever_is_reported() -> None:
    for seed in range(100):
        draw, search = random.Random(seed), GranularitySearch()
        batches = [draw.randint(1, 60000) for _ in range(draw.randint(1, 6))]
        for _ in range(60 * len(batches)):
            batch = draw.choice(batches)
            n = search.choose(batch)
            assert n <= batch
            if draw.random() < 0.9:  # else no backward
                search.report(batch, n, draw.random())
        assert all(search.settled(batch) for batch in batches), f"seed {seed}"


@given(
    st.lists(st.floats(0.0, 0.5), min_size=3, max_size=3),
    st.sampled_from(CANDIDATES),
    st.integers(8, 3000),
)
def test_the_best_number_is_found(changes: list[float], best: int, batch: int) -> None:
    """If times fall up to it, less with each number, and then rise."""
    seconds = {1: 2.0}
    falls = sorted(changes, reverse=True)
    for (n, more), fall, rise in zip(itertools.pairwise(CANDIDATES), falls, changes, strict=True):
        seconds[more] = seconds[n] + (0.1 + rise if n >= best else -fall)
    search = GranularitySearch()
    train(search, batch, seconds)
    assert seconds[search.choose(batch)] <= 1.1 * min(seconds.values())


def test_a_number_that_saves_little_ends_the_search() -> None:
    search = GranularitySearch()
    assert {*train(search, 1000, {1: 4.0, 2: 3.0, 4: 2.98, 8: 2.97})} == {1, 2, 4}
    assert search.choose(1000) == 4


def test_numbers_beyond_one_that_is_slower_are_not_tried() -> None:
    tried = train(GranularitySearch(), 1000, {1: 1.0, 2: 1.1, 4: 0.5, 8: 0.5})
    assert tried == [1] * 4 + [2] * 4


def test_a_batch_within_a_range_needs_no_trial() -> None:
    search = GranularitySearch()
    fast_4 = {1: 4.0, 2: 2.0, 4: 1.0, 8: 3.0}
    train(search, 100, fast_4)
    train(search, 900, fast_4)
    assert search.settled(500) == 4
    assert search.ranges == {4: (100, 900)}


def test_batches_beyond_a_range_try_only_larger_numbers() -> None:
    search = GranularitySearch()
    train(search, 100, {1: 4.0, 2: 1.0, 4: 2.0, 8: 3.0})
    tried = train(search, 1000, {1: 0.1, 2: 3.0, 4: 1.0, 8: 2.0})
    assert {*tried} == {2, 4, 8}
    assert search.choose(1000) == 4


@pytest.mark.parametrize("odd", [0.1, 9.0])
@pytest.mark.parametrize("place", range(4))
def test_one_odd_pass_does_not_decide(odd: float, place: int) -> None:
    """The first one with a number may compile kernels."""
    search, seconds = GranularitySearch(), {1: 1.0, 2: 0.9, 4: 0.8, 8: 1.0}
    for n, number in itertools.product((1, 2, 4, 8), range(4)):
        assert search.choose(1000) == n
        search.report(1000, n, seconds[n] * (odd if number == place else 1))
    assert search.settled(1000) == 4


def test_passes_without_measurement_get_a_number_too() -> None:
    search = GranularitySearch()
    assert search.guess(1000) in CANDIDATES
    assert search.guess(0) == search.guess(1) == 1
