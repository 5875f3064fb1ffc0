"""The slot plan: no two experts that are to be on the device share a slot."""

from hypothesis import given
from hypothesis import strategies as st

from overspill.moe.streaming.slot_plan import SlotPlan
from overspill.plan.banks import Chunk
from overspill.plan.budget import Placement


def placement(slots: int, resident: int) -> Placement:
    return Placement("host", 0, slots, resident, 0, 0, 0, 0, 256, 0)


@given(st.integers(1, 9), st.integers(2, 40), st.floats(0, 0.9), st.data())
def test_no_two_experts_share_a_slot_and_neighbours_are_adjacent(
    n_experts: int, slots: int, share: float, data: st.DataObject
) -> None:
    resident, layers = min(int(slots * share), slots - 2), 3
    homes = data.draw(st.lists(st.integers(0, n_experts), min_size=layers, max_size=layers))
    plan = SlotPlan(n_experts, homes, placement(slots, resident))
    in_banks = range((slots - resident) // plan.bank_size * plan.bank_size)
    chunks = [Chunk(layer, part) for layer in range(layers) for part in range(plan.n_parts)]
    rows = st.lists(st.integers(0, 9), min_size=n_experts, max_size=n_experts)
    for _ in range(4):
        needed = data.draw(st.lists(st.sampled_from(chunks), min_size=1, max_size=12))
        planned = plan.follow(iter(needed), lambda layer, positions: positions)
        taken = [slot for chunk in planned for slot in chunk.slots]
        assert len(set(taken)) == len(taken)
        assert all(0 <= slot < slots for slot in taken)
        assert planned[0].layer == needed[0].layer, "most urgent first"
        assert planned[0].positions == list(plan.positions(*needed[0]))
        for chunk in planned:
            of_layer = plan.slots(chunk.layer)
            assert [of_layer[position] for position in chunk.positions] == chunk.slots
            assert all(position >= homes[chunk.layer] for position in of_layer)
            offsets = {
                slot - position
                for position, slot in zip(chunk.positions, chunk.slots, strict=True)
                if slot in in_banks
            }
            assert len(offsets) <= 1, "neighbours are adjacent"
        counts = data.draw(st.lists(rows, min_size=layers, max_size=layers))
        plan.choose_residents(counts, on=data.draw(st.booleans()))
        plan.check_conserved()


def test_parts_cover_a_layer() -> None:
    plan = SlotPlan(10, [0, 3], placement(16, 4))
    for layer, first in ((0, 0), (1, 3)):
        parts = [plan.positions(layer, part) for part in range(plan.n_parts)]
        assert [p for positions in parts for p in positions] == list(range(first, 10))


def test_resident_experts_have_slots_of_their_own_until_they_are_turned_off() -> None:
    plan = SlotPlan(4, [0], placement(8, 2))
    plan.choose_residents([[4, 3, 2, 1]], on=True)
    assert {position for position, slot in plan.slots(0).items() if slot >= 6} == {0, 1}
    plan.choose_residents([[4, 3, 2, 1]], on=False)
    plan.follow([Chunk(0, part) for part in range(plan.n_parts)], lambda _, every: every)
    assert all(slot < 6 for slot in plan.slots(0).values())


def test_experts_without_expected_tokens_are_not_uploaded() -> None:
    plan = SlotPlan(4, [0], placement(4, 0))
    needed = [Chunk(0, part) for part in range(plan.n_parts)]
    planned = plan.follow(needed, lambda _, every: [p for p in every if p in (1, 2)])
    assert [position for chunk in planned for position in chunk.positions] == [1, 2]
