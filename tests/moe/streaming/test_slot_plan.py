"""Slots: no two experts of those that are to be resident ever share one."""

from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import ExpertId
from overspill.moe.residency import Residency
from overspill.plan.banks import Chunk
from overspill.plan.budget import Placement


def placement(slots: int, pinned: int) -> Placement:
    return Placement("host", slots, pinned, 0, 0, 0, 0, 256, 0)


@given(st.integers(1, 9), st.integers(2, 40), st.floats(0, 0.9), st.data())
def test_no_two_experts_share_a_slot_and_neighbours_lie_side_by_side(
    n_experts: int, slots: int, share: float, data: st.DataObject
) -> None:
    pinned = min(int(slots * share), slots - 2)
    residency = Residency(n_experts, placement(slots, pinned))
    layers = 3
    every_part = [
        Chunk(layer, part) for layer in range(layers) for part in range(residency.n_parts)
    ]
    for _ in range(4):
        needed = data.draw(st.lists(st.sampled_from(every_part), min_size=1, max_size=12))
        targets = residency.follow(iter(needed), lambda layer, indices: indices)
        taken = [slot for resident in targets for slot in resident.slots]
        assert len(set(taken)) == len(taken)
        assert all(0 <= slot < slots for slot in taken)
        first = [ExpertId(needed[0].layer, i) for i in residency.experts(needed[0].part)]
        wanted = [ExpertId(targets[0].layer, index) for index in targets[0].indices]
        assert wanted == first, "most urgent first"
        in_bank = [residency.slot(e) for e in first if e not in residency._pinned]
        assert in_bank == sorted(in_bank)
        tokens = data.draw(
            st.lists(
                st.lists(st.integers(0, 9), min_size=n_experts, max_size=n_experts),
                min_size=layers,
                max_size=layers,
            )
        )
        residency.pin(tokens, on=data.draw(st.booleans()))
        residency.check_conserved()


def test_parts_cover_a_layer() -> None:
    residency = Residency(10, placement(16, 4))
    indices = [i for part in range(residency.n_parts) for i in residency.experts(part)]
    assert indices == list(range(10))


def test_pinning_off_pins_nobody_and_frees_who_was() -> None:
    residency = Residency(4, placement(8, 2))
    residency.pin([[4, 3, 2, 1]], on=True)
    assert residency.slot(ExpertId(0, 0)) >= 6
    residency.pin([[4, 3, 2, 1]], on=False)
    residency.follow([Chunk(0, part) for part in range(residency.n_parts)], lambda _, every: every)
    assert residency.slot(ExpertId(0, 0)) < 6


def test_experts_without_expected_tokens_are_not_uploaded() -> None:
    residency = Residency(4, placement(4, 0))
    needed = [Chunk(0, part) for part in range(residency.n_parts)]
    targets = residency.follow(needed, lambda _, every: [i for i in every if i in (1, 2)])
    assert [index for resident in targets for index in resident.indices] == [1, 2]
