"""The plan of the GPU slots: banks of experts that follow the step."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from overspill.plan.banks import Chunk, assign_banks, bank_size


class PlannedChunk(NamedTuple):
    """Experts of a layer that are to be in slots, in the order of need, with their slots."""

    layer: int
    positions: list[int]
    slots: list[int]


class SlotPlan:
    """The planned content of the GPU slots. Used under the store's lock."""

    def __init__(self, n_local: int, residents: Sequence[int], n_slots: int) -> None:
        """`residents` is the number of resident experts of each layer, which need no slots."""
        self.n_local = n_local
        self._residents = residents
        self._n_slots = n_slots
        self._reset()

    def refresh(self) -> None:
        """Plan anew, before a pass, if the residents have changed."""
        if list(self._residents) != self._planned_for:
            self._reset()

    def _reset(self) -> None:
        self._planned_for: list[int] = []  # until the plan is complete
        streamed = max(1, self.n_local - min(self._residents))
        self.bank_size = bank_size(self._n_slots, streamed)
        self.n_parts = -(-streamed // self.bank_size)
        self._banks: list[Chunk | None] = [None] * (self._n_slots // self.bank_size)
        self._slots: dict[int, dict[int, int]] = {}  # by layer; cleared when an expert moves
        self._planned_for = list(self._residents)

    def fits(self, layers: range) -> bool:
        """Whether the slots hold the streamed experts of these layers at once."""
        parts = sum(
            -(-(self.n_local - self._residents[layer]) // self.bank_size) for layer in layers
        )
        return parts <= len(self._banks)

    def positions(self, layer: int, part: int) -> range:
        """The experts in a part of a layer."""
        first = self._residents[layer] + part * self.bank_size
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
        self._slots[layer] = found
        return found

    def follow(
        self, needed: Iterable[Chunk], uploads: Callable[[int, range], Iterable[int]]
    ) -> list[PlannedChunk]:
        """Assign the banks to the chunks that are needed next, and returns them in the order of
        need. `uploads(layer, positions)` says which experts are uploaded, and in which order."""
        # a layer with more resident experts has fewer parts: an empty one needs no bank
        streamed = (chunk for chunk in needed if self.positions(*chunk))
        banks, order = assign_banks(self._banks, streamed)
        if banks != self._banks:
            self._slots.clear()  # first: it must not outlive the banks if an interrupt comes
            self._banks = banks
        planned = []
        for chunk in order:
            slots = self.slots(chunk.layer)
            wanted = list(uploads(chunk.layer, self.positions(chunk.layer, chunk.part)))
            planned.append(PlannedChunk(chunk.layer, wanted, [slots[p] for p in wanted]))
        return planned

    def check_conserved(self) -> None:
        held = [chunk for chunk in self._banks if chunk is not None]
        assert len(held) == len(set(held)), "a chunk is in two banks"
