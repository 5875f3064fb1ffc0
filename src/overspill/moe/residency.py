"""Which expert belongs in which slot: banks that follow the step, and slots of pinned experts."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from overspill.core.experts import ExpertId
from overspill.plan.banks import Chunk, assign_banks, bank_size
from overspill.plan.budget import Placement
from overspill.plan.pinning import choose_pinned, place_pinned


class Resident(NamedTuple):
    """Experts of a layer that are to be in slots, in the order of need, with their slots."""

    layer: int
    indices: list[int]
    slots: list[int]


class Residency:
    """The slots of the compute device, as planned. Read and changed under the store's lock."""

    def __init__(self, n_experts: int, placement: Placement) -> None:
        self.n_experts = n_experts
        self.bank_size = bank_size(placement.banked, n_experts)
        n_banks = placement.banked // self.bank_size
        self.n_parts = -(-n_experts // self.bank_size)
        self._banks: list[Chunk | None] = [None] * n_banks
        self._pinned: dict[ExpertId, int] = {}
        self._slots: dict[int, dict[int, int]] = {}  # of each layer, until somebody moves
        self._pin_slots = range(n_banks * self.bank_size, placement.slots)

    def experts(self, part: int) -> range:
        """Indices of the experts in a part of a layer."""
        return range(part * self.bank_size, min((part + 1) * self.bank_size, self.n_experts))

    def slot(self, expert: ExpertId) -> int:
        """The slot of a pinned expert, or of one whose chunk has a bank."""
        pinned = self._pinned.get(expert)
        if pinned is not None:
            return pinned
        part, place = divmod(expert.index, self.bank_size)
        return self._banks.index(Chunk(expert.layer, part)) * self.bank_size + place

    def slots(self, layer: int) -> dict[int, int]:
        """The slot of every expert of a layer that has one."""
        known = self._slots.get(layer)
        if known is not None:
            return known
        found: dict[int, int] = {}
        for number, chunk in enumerate(self._banks):
            if chunk is not None and chunk.layer == layer:
                indices = self.experts(chunk.part)
                found.update(zip(indices, range(number * self.bank_size, 1 << 62), strict=False))
        found.update((e.index, slot) for e, slot in self._pinned.items() if e.layer == layer)
        self._slots[layer] = found
        return found

    def follow(
        self, needed: Iterable[Chunk], uploads: Callable[[int, range], Iterable[int]]
    ) -> list[Resident]:
        """Gives the banks to the chunks needed next; chunk by chunk, in the order of need, who is
        to be in which slot. `uploads` says which experts of a layer, out of some, are uploaded, and
        in which order."""
        before = self._banks
        self._banks, order = assign_banks(before, needed)
        if self._banks != before:
            self._slots.clear()
        residents = []
        for chunk in order:
            slots = self.slots(chunk.layer)
            indices = list(uploads(chunk.layer, self.experts(chunk.part)))
            residents.append(Resident(chunk.layer, indices, [slots[index] for index in indices]))
        return residents

    def pin(self, tokens: Sequence[Sequence[int]], on: bool) -> None:
        """Gives the pinned slots to the busiest experts of the step that ends."""
        chosen = choose_pinned(tokens, len(self._pin_slots) if on else 0)
        self._pinned = place_pinned(chosen, self._pinned, self._pin_slots)
        self._slots.clear()

    def check_conserved(self) -> None:
        held = [chunk for chunk in self._banks if chunk is not None]
        assert len(held) == len(set(held)), "a chunk is in two banks"
        pinned = list(self._pinned.values())
        assert len(pinned) == len(set(pinned)), "a slot is pinned twice"
        assert set(pinned) <= set(self._pin_slots), "an expert is pinned in a bank"
