"""Which expert belongs in which slot: banks that follow the step, and slots of pinned experts."""

from collections.abc import Callable, Iterable, Sequence

from overspill.core.experts import ExpertId
from overspill.plan.banks import Chunk, assign_banks, bank_size
from overspill.plan.budget import Placement
from overspill.plan.pinning import choose_pinned, place_pinned


class Residency:
    """The slots of the compute device, as planned. Read and changed under the store's lock."""

    def __init__(self, n_experts: int, placement: Placement) -> None:
        self.n_experts = n_experts
        self.bank_size = bank_size(placement.banked, n_experts)
        n_banks = placement.banked // self.bank_size
        self.n_parts = -(-n_experts // self.bank_size)
        self._banks: list[Chunk | None] = [None] * n_banks
        self._pinned: dict[ExpertId, int] = {}
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

    def follow(
        self, needed: Iterable[Chunk], expects: Callable[[int, int], bool]
    ) -> list[tuple[ExpertId, int]]:
        """Gives the banks to the chunks needed next; (expert, slot) in the order of need."""
        self._banks, order = assign_banks(self._banks, needed)
        experts = [
            ExpertId(chunk.layer, index)
            for chunk in order
            for index in self.experts(chunk.part)
            if expects(chunk.layer, index)
        ]
        return [(expert, self.slot(expert)) for expert in experts]

    def pin(self, tokens: Sequence[Sequence[int]], on: bool) -> None:
        """Gives the pinned slots to the busiest experts of the step that ends."""
        chosen = choose_pinned(tokens, len(self._pin_slots) if on else 0)
        self._pinned = place_pinned(chosen, self._pinned, self._pin_slots)

    def check_conserved(self) -> None:
        held = [chunk for chunk in self._banks if chunk is not None]
        assert len(held) == len(set(held)), "a chunk is in two banks"
        pinned = list(self._pinned.values())
        assert len(pinned) == len(set(pinned)), "a slot is pinned twice"
        assert set(pinned) <= set(self._pin_slots), "an expert is pinned in a bank"
