"""Which expert belongs in which GPU slot: banks that follow the step, and resident experts."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from overspill.plan.banks import Chunk, assign_banks, bank_size
from overspill.plan.budget import Placement
from overspill.plan.residents import LayerPosition, choose_residents, place_residents


class PlannedChunk(NamedTuple):
    """Experts of a layer that are to be in slots, in the order of need, with their slots."""

    layer: int
    positions: list[int]
    slots: list[int]


class SlotPlan:
    """The planned content of the GPU slots. Used under the store's lock."""

    def __init__(self, n_local: int, homes: Sequence[int], placement: Placement) -> None:
        """`homes` are the experts of each layer at home on the device, which need no slots."""
        self.n_local = n_local
        self._homes = homes
        self._placement = placement
        self._reset()

    def refresh(self) -> None:
        """Before a pass: plans anew if the homes have changed."""
        if list(self._homes) != self._planned_for:
            self._reset()

    def _reset(self) -> None:
        placement = self._placement
        self._planned_for: list[int] = []  # until the plan is complete
        streamed = max(1, self.n_local - min(self._homes))
        self.bank_size = bank_size(placement.banked, streamed)
        n_banks = placement.banked // self.bank_size
        self.n_parts = -(-streamed // self.bank_size)
        self._banks: list[Chunk | None] = [None] * n_banks
        self._residents: dict[LayerPosition, int] = {}
        self._slots: dict[int, dict[int, int]] = {}  # by layer; cleared when an expert moves
        self._resident_slots = range(n_banks * self.bank_size, placement.slots)
        self._planned_for = list(self._homes)

    def positions(self, layer: int, part: int) -> range:
        """The experts in a part of a layer."""
        first = self._homes[layer] + part * self.bank_size
        return range(first, min(first + self.bank_size, self.n_local))

    def slots(self, layer: int) -> dict[int, int]:
        """The slot of every expert of a layer that has one."""
        known = self._slots.get(layer)
        if known is not None:
            return known
        found: dict[int, int] = {}
        for number, chunk in enumerate(self._banks):
            if chunk is not None and chunk.layer == layer:
                first = number * self.bank_size
                found.update(
                    (position, first + offset)
                    for offset, position in enumerate(self.positions(chunk.layer, chunk.part))
                )
        found.update((at.position, s) for at, s in self._residents.items() if at.layer == layer)
        self._slots[layer] = found
        return found

    def follow(
        self, needed: Iterable[Chunk], uploads: Callable[[int, range], Iterable[int]]
    ) -> list[PlannedChunk]:
        """Assigns the banks to the chunks that are needed next, and returns them in the order of
        need. `uploads(layer, positions)` says which experts are uploaded, and in which order."""
        banks, order = assign_banks(self._banks, needed)
        if banks != self._banks:
            self._slots.clear()  # first: it must not outlive the banks if an interrupt comes
            self._banks = banks
        planned = []
        for chunk in order:
            slots = self.slots(chunk.layer)
            wanted = list(uploads(chunk.layer, self.positions(chunk.layer, chunk.part)))
            planned.append(PlannedChunk(chunk.layer, wanted, [slots[p] for p in wanted]))
        return planned

    def choose_residents(self, counts: Sequence[Sequence[int]], on: bool) -> None:
        """Gives the resident slots to the busiest experts of the step that ends."""
        streamed = [
            [0] * home + list(of_layer[home:])
            for home, of_layer in zip(self._homes, counts, strict=True)
        ]
        chosen = choose_residents(streamed, len(self._resident_slots) if on else 0)
        self._slots.clear()
        self._residents = place_residents(chosen, self._residents, self._resident_slots)

    def check_conserved(self) -> None:
        held = [chunk for chunk in self._banks if chunk is not None]
        assert len(held) == len(set(held)), "a chunk is in two banks"
        slots = list(self._residents.values())
        assert len(slots) == len(set(slots)), "a slot has two resident experts"
        assert set(slots) <= set(self._resident_slots), "a resident expert is in a bank"
