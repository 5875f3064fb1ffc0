"""Pinned are the busiest experts of the last step; who was pinned stays where it is."""

from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import ExpertId
from overspill.plan.pinning import choose_pinned, place_pinned

counts = st.integers(1, 5).flatmap(
    lambda experts: st.lists(
        st.lists(st.integers(0, 20), min_size=experts, max_size=experts), min_size=1, max_size=4
    )
)


@given(counts, st.integers(0, 12))
def test_the_busiest_are_chosen_and_none_without_tokens(
    tokens: list[list[int]], places: int
) -> None:
    before = [list(layer) for layer in tokens]
    chosen = choose_pinned(tokens, places)
    assert tokens == before, "the history is only read"
    of = {
        ExpertId(layer, index): count
        for layer, counts in enumerate(tokens)
        for index, count in enumerate(counts)
    }
    busy = [expert for expert, count in of.items() if count]
    assert len(chosen) == len(set(chosen)) == min(places, len(busy))
    assert chosen == sorted(chosen)
    assert all(of[expert] for expert in chosen)
    left = [of[expert] for expert in busy if expert not in chosen]
    if chosen and left:
        assert min(of[expert] for expert in chosen) >= max(left)


experts = st.builds(ExpertId, st.integers(0, 3), st.integers(0, 4))


@given(st.data(), st.integers(0, 6), st.integers(0, 9))
def test_who_stays_keeps_its_slot_and_nobody_shares_one(
    data: st.DataObject, places: int, first: int
) -> None:
    slots = range(first, first + places)
    one = data.draw(st.lists(experts, unique=True, max_size=places))
    two = data.draw(st.lists(experts, unique=True, max_size=places))
    now = place_pinned(one, {}, slots)
    then = place_pinned(two, now, slots)
    for chosen, placed in ((one, now), (two, then)):
        assert set(placed) == set(chosen)
        assert len(set(placed.values())) == len(placed)
        assert set(placed.values()) <= set(slots)
    for expert in set(one) & set(two):
        assert then[expert] == now[expert]
