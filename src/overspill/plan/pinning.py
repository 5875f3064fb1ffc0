"""Which experts stay on the compute device: the busiest of the last step (es-moe, section 4.3)."""

from collections.abc import Mapping, Sequence

from overspill.core.experts import ExpertId


def choose_pinned(tokens: Sequence[Sequence[int]], places: int) -> list[ExpertId]:
    """The `places` experts with the most tokens, in layer order; `tokens[layer][index]`."""
    ranked = sorted(
        (-count, ExpertId(layer, index))
        for layer, counts in enumerate(tokens)
        for index, count in enumerate(counts)
        if count
    )
    return sorted(expert for _, expert in ranked[:places])


def place_pinned(
    chosen: Sequence[ExpertId], now: Mapping[ExpertId, int], slots: range
) -> dict[ExpertId, int]:
    """Slots for the chosen experts: who was pinned before keeps its slot and its weights."""
    placed = {expert: now[expert] for expert in chosen if expert in now}
    taken = set(placed.values())
    free = (slot for slot in slots if slot not in taken)
    for expert in chosen:
        if expert not in placed:
            placed[expert] = next(free)
    return placed
