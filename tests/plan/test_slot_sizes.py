"""Slots of several sizes, in the proportions of the experts."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.slot_sizes import most_slots, slot_sizes

COUNTS = st.dictionaries(st.integers(1, 9), st.integers(0, 40), min_size=1, max_size=5)


@given(COUNTS, st.integers(1, 200))
def test_every_beginning_has_the_proportions_of_the_experts(
    counts: dict[int, int], number: int
) -> None:
    total = sum(counts.values())
    sizes = list(islice(slot_sizes(counts), number))
    assert len(sizes) == number
    for size, count in counts.items():
        if total:
            assert abs(sizes.count(size) - number * count / total) < len(counts)


def test_as_many_slots_as_experts_have_their_sizes() -> None:
    counts = {4: 10, 6: 5, 8: 1}
    sizes = list(islice(slot_sizes(counts), 16))
    assert {size: sizes.count(size) for size in counts} == counts


@pytest.mark.parametrize(("free", "slots"), [(-1, 0), (0, 0), (29, 9), (30, 10), (1000, 10)])
def test_slots_of_one_size_fill_the_memory(free: int, slots: int) -> None:
    assert most_slots({3: 10}, free) == slots


@given(COUNTS, st.integers(0, 2000))
def test_no_further_slot_fits(counts: dict[int, int], free: int) -> None:
    slots = most_slots(counts, free)
    sizes = list(islice(slot_sizes(counts), sum(counts.values())))
    assert sum(sizes[:slots]) <= free
    assert slots == len(sizes) or sum(sizes[: slots + 1]) > free
