"""The split of a layer's experts between CPU and GPU, compared with every possible subset."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from overspill.hardware.profile import Curve
from overspill.plan.split import SplitCosts, pass_time, split

# similar to measurements of the reference machine with experts of 1024x4096
MEASURED = SplitCosts(
    load=0.34e-3,
    load_beside=0.36e-3,
    cpu=Curve((1, 16, 64, 256, 1024), (0.45e-3, 0.5e-3, 0.7e-3, 1.4e-3, 4.2e-3)),
    gpu=Curve((1, 1024, 4096), (0.02e-3, 0.04e-3, 0.1e-3)),
    fixed=0.1e-3,
)


def brute_force(tokens: list[int], resident: set[int], costs: SplitCosts) -> float:
    busy = [index for index, count in enumerate(tokens) if count]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(busy, size) for size in range(len(busy) + 1)
    )
    return min(pass_time(tokens, resident, set(subset), costs) for subset in subsets)


def replace(costs: SplitCosts, **changes: object) -> SplitCosts:
    return SplitCosts(**{**costs.__dict__, **changes})  # type: ignore[arg-type]


@st.composite
def machines(draw: st.DrawFn) -> SplitCosts:
    """Any machine whose GPU is at least five times faster than its CPU."""
    load = draw(st.floats(1e-5, 1e-2))
    first = draw(st.floats(1e-5, 1e-2))
    knee = draw(st.integers(2, 300))
    last = first * 1.1 + draw(st.floats(0, 1e-4)) * (1000 - knee)
    cpu = (first, first * 1.1, last)
    faster = sorted(draw(st.floats(5, 200)) for _ in cpu)  # the speed-up grows with the tokens
    gpu = [seconds / factor for seconds, factor in zip(cpu, faster, strict=True)]
    return SplitCosts(
        load=load,
        load_beside=load * draw(st.floats(1, 2)),
        cpu=Curve((1, knee, 1000), cpu),
        gpu=Curve((1, knee, 1000), tuple(itertools.accumulate(gpu, max))),
        fixed=draw(st.floats(0, 1e-3)),
    )


counts = st.lists(st.sampled_from([0, 0, 1, 2, 5, 9, 30, 70, 200, 600]), min_size=1, max_size=9)


@given(counts, st.sets(st.integers(0, 8)), machines())
def test_a_split_is_within_a_tenth_of_the_best_subset(
    tokens: list[int], resident: set[int], costs: SplitCosts
) -> None:
    chosen = split(tokens, resident, costs)
    assert all(tokens[index] for index in chosen)
    best = brute_force(tokens, resident, costs)
    assert pass_time(tokens, resident, chosen, costs) <= 1.1 * best + 1e-12


@given(counts, st.sets(st.integers(0, 8)), machines())
def test_a_split_is_never_slower_than_no_split(
    tokens: list[int], resident: set[int], costs: SplitCosts
) -> None:
    chosen = split(tokens, resident, costs)
    alone = pass_time(tokens, resident, set(), costs)
    assert not chosen or pass_time(tokens, resident, chosen, costs) < alone


def test_the_cpu_takes_rare_experts_and_the_gpu_busy_ones() -> None:
    tokens = [450, 440, *[10] * 14]
    chosen = split(tokens, set(), MEASURED)
    assert chosen
    assert chosen <= set(range(2, 16))
    ratio = pass_time(tokens, set(), set(), MEASURED) / pass_time(tokens, set(), chosen, MEASURED)
    assert ratio > 1.5


def test_equal_and_large_counts_all_go_to_the_gpu() -> None:
    assert not split([4096] * 16, set(), MEASURED)


def test_resident_experts_compute_on_the_gpu() -> None:
    tokens = [5] * 16
    chosen = split(tokens, set(range(0, 16, 2)), MEASURED)
    assert chosen <= set(range(1, 16, 2))
    assert not split(tokens, set(range(16)), MEASURED)


@given(counts, st.sets(st.integers(0, 8)), machines())
def test_uploaded_experts_stay_on_the_gpu_and_count_for_the_link(
    tokens: list[int], uploaded: set[int], costs: SplitCosts
) -> None:
    chosen = split(tokens, set(), costs, uploaded=uploaded)
    assert not chosen & uploaded
    free = [i for i, count in enumerate(tokens) if count and i not in uploaded]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(free, size) for size in range(len(free) + 1)
    )
    best = min(pass_time(tokens, set(), set(subset), costs) for subset in subsets)
    assert pass_time(tokens, set(), chosen, costs) <= 1.1 * best + 1e-12


def test_the_cpu_takes_at_most_max_rows_tokens() -> None:
    tokens = [10] * 16
    for limit in (0, 9, 10, 35, 1000):
        chosen = split(tokens, set(), MEASURED, max_rows=limit)
        assert sum(tokens[index] for index in chosen) <= limit


def test_one_token_decode_uses_cpu_and_gpu() -> None:
    tokens = [0] * 128
    for index in (3, 17, 40, 41, 77, 90, 101, 127):
        tokens[index] = 1
    chosen = split(tokens, {3, 17}, MEASURED)
    assert 1 <= len(chosen) <= 5
    assert not chosen & {3, 17}
