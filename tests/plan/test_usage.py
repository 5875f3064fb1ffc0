"""Exchanges by usage: the most used experts live on the device, and nothing moves without need."""

import random

from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.usage import Exchange, exchanges


def test_a_streamed_expert_takes_the_place_of_an_unused_one() -> None:
    assert exchanges([20], [[20, 0, 20, 0]], [2], most=8) == [Exchange(0, 1, 2)]


def test_the_largest_gains_of_all_layers_come_first() -> None:
    uses = [[10, 4, 60, 90], [0, 50, 100, 100]]
    assert exchanges([100, 100], uses, [2, 2], most=2) == [Exchange(1, 0, 2), Exchange(0, 1, 3)]


def test_experts_that_are_used_in_every_pass_stay_in_place() -> None:
    assert exchanges([50], [[50] * 8], [3], most=8) == []


def test_a_few_passes_are_not_enough_to_tell() -> None:
    for passes in range(4):
        assert exchanges([passes], [[0, passes]], [1], most=8) == []


def test_a_gain_that_does_not_pay_for_the_transfers_is_left() -> None:
    passes = 10**6  # so many that the difference is certain
    assert exchanges([passes], [[0, passes // 32]], [1], most=8) == []
    assert exchanges([passes], [[0, passes // 8]], [1], most=8) == [Exchange(0, 0, 1)]


def test_layers_with_all_or_no_experts_at_home_have_nothing_to_exchange() -> None:
    assert exchanges([50, 50], [[0, 50], [0, 50]], [0, 2], most=8) == []


def test_random_use_that_is_balanced_moves_next_to_nothing() -> None:
    rng, moved = random.Random(0), 0
    uses = [[0] * 64 for _ in range(8)]
    for number in range(1, 257):
        for layer in uses:
            for position in rng.sample(range(64), 8):
                layer[position] += 1
        if number % 8 == 0:
            moved += len(exchanges([number] * 8, uses, [32] * 8, most=1000))
    assert moved <= 2  # of 8192 pairs that were compared


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=6, max_size=6), min_size=1, max_size=3),
    st.integers(0, 6),
    st.integers(1, 5),
)
def test_after_the_exchanges_there_are_no_others(
    uses: list[list[int]], home: int, most: int
) -> None:
    """They end, whatever the usage is: an exchange is never taken back."""
    homes, passes = [home] * len(uses), [60] * len(uses)
    seen = 0
    while found := exchanges(passes, uses, homes, most):
        assert len(found) <= most
        for layer, first, second in found:
            own = uses[layer]
            assert first < home <= second
            assert own[first] < own[second]
            own[first], own[second] = own[second], own[first]
        seen += len(found)
        assert seen <= 3 * len(uses)
