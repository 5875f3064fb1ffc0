"""Experts that stay on the GPU: the busiest ones of the last step (es-moe, section 4.3)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class LayerPosition(NamedTuple):
    """A local expert: its layer and its position there."""

    layer: int
    position: int


def choose_residents(counts: Sequence[Sequence[int]], slots: int) -> list[LayerPosition]:
    """The `slots` experts with the most token rows, in layer order; `counts[layer][position]`."""
    ranked = sorted(
        (-count, LayerPosition(layer, position))
        for layer, layer_counts in enumerate(counts)
        for position, count in enumerate(layer_counts)
        if count
    )
    return sorted(expert for _, expert in ranked[:slots])


def place_residents(
    chosen: Sequence[LayerPosition], current: Mapping[LayerPosition, int], slots: range
) -> dict[LayerPosition, int]:
    """Slots for the chosen experts. An expert that is already resident keeps its slot."""
    placed = {expert: current[expert] for expert in chosen if expert in current}
    taken = set(placed.values())
    free = (slot for slot in slots if slot not in taken)
    for expert in chosen:
        if expert not in placed:
            placed[expert] = next(free)
    return placed
