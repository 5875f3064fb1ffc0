"""The slot plan: no two experts that are to be on the device share a slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.moe.streaming.slot_plan import SlotPlan
from overspill.plan.banks import Chunk


def chunks(plan: SlotPlan, layers: int) -> list[Chunk]:
    return [Chunk(layer, part) for layer in range(layers) for part in range(plan.n_parts)]


def every(layer: int, positions: range) -> range:
    return positions


@given(st.integers(1, 9), st.integers(2, 40), st.data())
def test_no_two_experts_share_a_slot_and_neighbours_are_adjacent(
    n_experts: int, slots: int, data: st.DataObject
) -> None:
    layers = 3
    residents = data.draw(st.lists(st.integers(0, n_experts), min_size=layers, max_size=layers))
    plan = SlotPlan(n_experts, residents, slots)
    for _ in range(4):
        needed = data.draw(st.lists(st.sampled_from(chunks(plan, layers)), min_size=1, max_size=12))
        planned = plan.follow(iter(needed), every)
        taken = [slot for chunk in planned for slot in chunk.slots]
        assert len(set(taken)) == len(taken)
        assert all(0 <= slot < slots for slot in taken)
        streamed = [chunk for chunk in needed if plan.positions(*chunk)]
        assert bool(planned) == bool(streamed)
        if planned:
            assert planned[0].layer == streamed[0].layer, "most urgent first"
            assert planned[0].positions == list(plan.positions(*streamed[0]))
        for chunk in planned:
            of_layer = plan.slots(chunk.layer)
            assert [of_layer[position] for position in chunk.positions] == chunk.slots
            assert all(position >= residents[chunk.layer] for position in of_layer)
            offsets = {s - p for p, s in zip(chunk.positions, chunk.slots, strict=True)}
            assert len(offsets) == 1, "neighbours are adjacent"
        plan.check_conserved()


def test_parts_cover_a_layer() -> None:
    plan = SlotPlan(10, [0, 3], 12)
    for layer, first in ((0, 0), (1, 3)):
        parts = [plan.positions(layer, part) for part in range(plan.n_parts)]
        assert [p for positions in parts for p in positions] == list(range(first, 10))


@pytest.mark.parametrize(
    ("residents", "slots"),
    [
        ([5, 5, 4, 5, 4, 4], 3),  # three layers stream nothing, the others one expert
        ([1, 1, 1, 0, 0, 0], 6),  # one part more in half of the layers
        ([4, 4, 4, 4, 4, 4], 6),  # all streamed experts fit in the slots
    ],
)
def test_slots_are_filled_also_if_some_layers_stream_fewer_experts(
    residents: list[int], slots: int
) -> None:
    plan = SlotPlan(5, residents, slots)
    planned = plan.follow(chunks(plan, len(residents)), every)
    assert sum(len(chunk.slots) for chunk in planned) == slots


def test_after_residents_have_changed_the_slots_are_divided_anew() -> None:
    residents = [0, 0, 0, 0]
    plan = SlotPlan(6, residents, 12)
    plan.follow(chunks(plan, 4), every)
    assert [len(plan.slots(layer)) for layer in range(4)] == [6, 6, 0, 0]
    residents[:] = [3, 3, 3, 3]
    plan.refresh()
    plan.follow(chunks(plan, 4), every)
    assert [len(plan.slots(layer)) for layer in range(4)] == [3, 3, 3, 3]


def test_experts_without_expected_tokens_are_not_uploaded() -> None:
    plan = SlotPlan(4, [0], 4)
    planned = plan.follow(chunks(plan, 1), lambda _, every: [p for p in every if p in (1, 2)])
    assert [position for chunk in planned for position in chunk.positions] == [1, 2]
