"""The busiest experts of the last step are resident; one that stays keeps its slot."""

from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.residents import LayerPosition, choose_residents, place_residents

counts = st.integers(1, 5).flatmap(
    lambda experts: st.lists(
        st.lists(st.integers(0, 20), min_size=experts, max_size=experts), min_size=1, max_size=4
    )
)


@given(counts, st.integers(0, 12))
def test_the_busiest_are_chosen_and_none_without_tokens(
    counts_LE: list[list[int]], slots: int
) -> None:
    before = [list(layer) for layer in counts_LE]
    chosen = choose_residents(counts_LE, slots)
    assert counts_LE == before, "the counts are only read"
    of = {
        LayerPosition(layer, position): count
        for layer, layer_counts in enumerate(counts_LE)
        for position, count in enumerate(layer_counts)
    }
    busy = [expert for expert, count in of.items() if count]
    assert len(chosen) == len(set(chosen)) == min(slots, len(busy))
    assert chosen == sorted(chosen)
    assert all(of[expert] for expert in chosen)
    left = [of[expert] for expert in busy if expert not in chosen]
    if chosen and left:
        assert min(of[expert] for expert in chosen) >= max(left)


experts = st.builds(LayerPosition, st.integers(0, 3), st.integers(0, 4))


@given(st.data(), st.integers(0, 6), st.integers(0, 9))
def test_an_expert_that_stays_keeps_its_slot_and_no_two_share_one(
    data: st.DataObject, slots: int, first: int
) -> None:
    where = range(first, first + slots)
    one = data.draw(st.lists(experts, unique=True, max_size=slots))
    two = data.draw(st.lists(experts, unique=True, max_size=slots))
    now = place_residents(one, {}, where)
    then = place_residents(two, now, where)
    for chosen, placed in ((one, now), (two, then)):
        assert set(placed) == set(chosen)
        assert len(set(placed.values())) == len(placed)
        assert set(placed.values()) <= set(where)
    for expert in set(one) & set(two):
        assert then[expert] == now[expert]
