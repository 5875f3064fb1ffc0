"""The search for the number of partitions: what MPipeMoE's Algorithm 1 promises."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.errors import ConfigError
from overspill.plan.granularity import CANDIDATES, GranularitySearch, PassTime

BATCHES = st.lists(st.integers(1, 3000), min_size=1, max_size=12)
TIMES = st.fixed_dictionaries({n: st.floats(1e-3, 1.0) for n in CANDIDATES})


def train(search: GranularitySearch, batch: int, seconds: dict[int, float]) -> list[int]:
    """Trials until the best number is known."""
    tried = []
    while search.settled(batch) is None:
        tried.append(search.choose(batch))
        search.report(batch, tried[-1], PassTime(seconds[tried[-1]]))
        assert len(tried) < 20, "the search does not end"
    return tried


@given(st.lists(st.tuples(st.integers(1, 3000), TIMES), min_size=1, max_size=12))
def test_ranges_are_disjoint_and_grow_with_the_number(
    work: list[tuple[int, dict[int, float]]],
) -> None:
    search = GranularitySearch()
    for batch, seconds in work:
        train(search, batch, seconds)
        assert search.choose(batch) <= batch
    ranges = list(search.ranges.values())
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
            rank.report(batch, n, PassTime(seconds[n]))


def test_searches_of_several_batches_end_whatever_is_reported() -> None:
    for seed in range(100):
        assert all(found_with_random_reports(random.Random(seed))), f"seed {seed}"


def found_with_random_reports(draw: random.Random) -> list[int | None]:
    """The numbers of partitions that a search has found for some batches."""
    search = GranularitySearch()
    batches = [draw.randint(1, 60000) for _ in range(draw.randint(1, 6))]
    uncounted: Counter[tuple[int, int]] = Counter()
    for _ in range(120 * len(batches)):
        batch = draw.choice(batches)
        n = search.choose(batch)
        assert n <= batch
        if draw.random() < 0.1:  # no backward
            continue
        host, device = draw.choice([0.0, draw.random() * n]), draw.random()
        step = draw.choice([0.0, max(device, host) + draw.random()])
        found: PassTime | None = PassTime(device, host, 0.8 * host, step)
        if uncounted[batch, n] < 2 and draw.random() < 0.5:  # it allocates memory
            uncounted[batch, n] += 1
            found = None
        search.report(batch, n, found)
    return [search.settled(batch) for batch in batches]


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
    assert seconds[search.choose(batch)] <= 1.05 * min(seconds.values())


def test_a_number_that_saves_little_ends_the_search() -> None:
    search = GranularitySearch()
    assert {*train(search, 1000, {1: 4.0, 2: 3.0, 4: 2.98, 8: 2.97})} == {1, 2, 4}
    assert search.choose(1000) == 4


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


@pytest.mark.parametrize(("slow", "times"), [(1.12, 3), (1.5, 2)])
def test_a_slow_number_is_tried_twice_or_three_times_and_larger_ones_never(
    slow: float, times: int
) -> None:
    search = GranularitySearch()
    tried = train(search, 1000, {1: 1.0, 2: slow, 4: 3.0, 8: 6.0})
    assert tried.count(2) == times
    assert {*tried} == {1, 2}


def test_a_first_pass_that_loads_kernels_is_not_counted() -> None:
    search = GranularitySearch()
    seconds = {1: 1.0, 2: 0.8, 4: 2.0, 8: 3.0}
    for n in (1, 1, 2):
        assert search.choose(1000) == n
        loading = 5.0 if n == 2 else 0.0
        search.report(1000, n, PassTime(seconds[n] + loading, host=0.1 * n + loading))
    train(search, 1000, seconds)
    assert search.choose(1000) == 2


def test_a_number_that_always_takes_the_host_long_is_dropped() -> None:
    search, tried = GranularitySearch(), []
    while search.settled(1000) is None:
        tried.append(n := search.choose(1000))
        search.report(1000, n, PassTime(1.0 if n == 1 else 9.0, host=0.1 if n == 1 else 9.0))
    assert tried.count(2) == 2, "one pass may load kernels"
    assert search.choose(1000) == 1


def test_passes_with_one_number_follow_each_other() -> None:
    tried = train(GranularitySearch(), 1000, {1: 1.0, 2: 0.97, 4: 0.95, 8: 0.95})
    assert tried[:13] == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 1, 1, 1]


def test_a_number_that_the_host_cannot_queue_in_time_is_never_tried() -> None:
    search, tried = GranularitySearch(), []
    while search.settled(1000) is None:
        tried.append(n := search.choose(1000))
        # the device takes 4 ms with one partition, and less with more; the host 1 ms for each
        host = n * 1e-3
        search.report(1000, n, PassTime(max(1e-3 + 3e-3 / n, host), host, host))
    assert {*tried} == {1, 2}, "with 4 partitions the device waits for the host"
    assert search.choose(1000) == 2


def chosen(device: dict[int, float], step: dict[int, float]) -> int:
    search = GranularitySearch(sorted(device))
    while search.settled(1000) is None:
        n = search.choose(1000)
        search.report(1000, n, PassTime(device[n], step=step[n]))
    return search.choose(1000)


def test_the_time_of_steps_decides_where_it_depends_on_the_number() -> None:
    faster = {1: 4.0, 2: 3.0}
    assert chosen(faster, {1: 5.0, 2: 6.0}) == 1, "steps wait for the host"
    assert chosen(faster, {1: 5.0, 2: 4.0}) == 2
    assert chosen(faster, {1: 50.0, 2: 50.5}) == 2, "a small part of the model"


def test_one_slow_pass_does_not_end_the_search() -> None:
    search = GranularitySearch()
    seconds = {1: 1.0, 2: 0.9, 4: 0.8, 8: 2.0}
    search.report(1000, 1, PassTime(1.0))
    search.report(1000, 1, PassTime(1.0))
    search.report(1000, 2, PassTime(1.1))  # disturbed
    train(search, 1000, seconds)
    assert search.choose(1000) == 4


def test_the_first_pass_is_not_counted() -> None:
    search = GranularitySearch()
    search.report(64, search.choose(64), PassTime(100.0))  # compiles kernels
    train(search, 64, {1: 4.0, 2: 3.0, 4: 2.0, 8: 1.0})
    assert search.choose(64) == 8


def test_a_number_that_is_left_alone_needs_two_counted_passes() -> None:
    """At once if the host cannot be much faster with more partitions."""
    seconds = {1: 4.0, 2: 3.0, 4: 5.0, 8: 6.0}
    assert train(GranularitySearch(), 1000, seconds) == [1, 1, 2, 2, 4, 4, 2, 2]
    search, tried = GranularitySearch(), []
    while search.settled(1000) is None:
        tried.append(n := search.choose(1000))
        search.report(1000, n, PassTime(seconds[n], host=0.8 * n, partitions=0.8 * n))
    assert tried == [1, 1, 2, 2, 2, 4, 4]


@pytest.mark.parametrize(("host", "tried"), [(0.9, {2, 4}), (5.0, {1, 2, 4})])
def test_a_smaller_batch_tells_what_is_slow_unless_it_waited_for_the_host(
    host: float, tried: set[int]
) -> None:
    """With 1,000 tokens two partitions save time on the device alone."""
    search = GranularitySearch()
    device = {1: 4.0, 2: 3.0, 4: 3.5}
    while search.settled(1000) is None:
        n = search.choose(1000)
        search.report(1000, n, PassTime(device[n], host=host * n, step=4.0 + n))
    assert search.choose(1000) == 1
    assert {*train(search, 2000, {1: 8.0, 2: 6.0, 4: 7.0, 8: 9.0})} == tried
    assert search.choose(2000) == 2


@pytest.mark.parametrize(("outside", "tried"), [(1.5, {1}), (9.0, {1, 2})])
def test_steps_that_wait_for_the_host_tell_what_larger_batches_take_at_least(
    outside: float, tried: set[int]
) -> None:
    """If the layer is a large part of the model: the host needs 2 s for a partition."""

    def search_for(batch: int, device: dict[int, float]) -> set[int]:
        found = set()
        while search.settled(batch) is None:
            found.add(n := search.choose(batch))
            host = 2.0 * n
            step = max(device[n] + 0.5, host + outside)
            search.report(batch, n, PassTime(max(device[n], host), host, host, step))
        return found

    search = GranularitySearch()
    assert search_for(1000, {1: 1.0, 2: 0.8}) == {1}
    assert search_for(2000, {1: 4.0, 2: 3.5}) == tried
    assert search.choose(2000) == 1


def test_a_batch_that_is_many_times_larger_tries_all_numbers_again() -> None:
    search = GranularitySearch()
    train(search, 1000, {1: 4.0, 2: 5.0})
    assert 1 in train(search, 8000, {1: 32.0, 2: 20.0, 4: 30.0})


def test_the_next_choice_depends_on_a_report_only_where_a_run_of_passes_ends() -> None:
    search, depends = GranularitySearch(), []
    for _ in range(5):
        depends.append(search.depends_on_report(1000))
        search.report(1000, n := search.choose(1000), PassTime({1: 1.0, 2: 1.05}[n]))
    assert depends == [True, False, True, False, True]


@pytest.mark.parametrize("odd", [0.5, 1.5])
def test_one_odd_pass_of_three_does_not_decide(odd: float) -> None:
    search = GranularitySearch([1, 2])
    for n, seconds in ((1, 1.0), (1, 1.0), (2, 1.05), (2, 1.05 * odd)):
        assert search.choose(1000) == n
        search.report(1000, n, PassTime(seconds))
    train(search, 1000, {1: 1.0, 2: 1.05})
    assert search.choose(1000) == 1


def test_passes_without_measurement_get_a_number_too() -> None:
    search = GranularitySearch()
    assert search.guess(1000) in CANDIDATES
    assert search.guess(0) == search.guess(1) == 1


@pytest.mark.parametrize("candidates", [[], [0, 1], [2, 2]])
def test_impossible_candidates_are_refused(candidates: list[int]) -> None:
    with pytest.raises(ConfigError, match="candidates"):
        GranularitySearch(candidates)
