"""Exchanges by usage: the experts with the most token rows live on the device."""

from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.usage import Swap, swaps


def test_a_streamed_expert_takes_the_place_of_one_with_fewer_rows() -> None:
    assert swaps([[20, 3, 20, 4]], [2], most=8) == [Swap(0, 1, 2)]


def test_the_largest_gains_of_all_layers_come_first() -> None:
    rows = [[10, 4, 60, 90], [0, 50, 100, 100]]
    assert swaps(rows, [2, 2], most=2) == [Swap(1, 0, 2), Swap(0, 1, 3)]


def test_layers_with_all_or_no_resident_experts_or_without_routing_swap_nothing() -> None:
    assert swaps([[0, 50], [0, 50], None], [0, 2, 1], most=8) == []


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=6, max_size=6), min_size=1, max_size=3),
    st.integers(0, 6),
    st.integers(1, 5),
)
def test_in_the_end_the_heaviest_experts_are_resident(
    rows: list[list[int]], count: int, most: int
) -> None:
    residents, seen = [count] * len(rows), 0
    heaviest = [sorted(own, reverse=True)[:count] for own in rows]
    while found := swaps(rows, residents, most):
        assert len(found) <= most
        for layer, first, second in found:
            own = rows[layer]
            assert first < count <= second
            assert own[first] < own[second]
            own[first], own[second] = own[second], own[first]
        seen += len(found)
        assert seen <= 3 * len(rows)
    assert [sorted(own[:count], reverse=True) for own in rows] == heaviest
