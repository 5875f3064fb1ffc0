"""Banks: the slots of the compute device are cut into runs of equal length, and each run holds a
run of neighbouring experts of one layer (a chunk). Neighbours in a layer are then neighbours in
memory, which is what lets them compute as one wave."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Experts [part * bank size, (part + 1) * bank size) of a layer."""

    layer: int
    part: int


def bank_size(slots: int, n_experts: int) -> int:
    """Experts a bank. At least three banks where there are three slots, so that some fill while one
    computes; no longer than a layer; parts of a layer as equal as can be."""
    longest = min(n_experts, max(1, slots // 3))
    parts = -(-n_experts // longest)
    return -(-n_experts // parts)


def assign_banks(
    held: Sequence[Chunk | None], needed: Iterable[Chunk]
) -> tuple[list[Chunk | None], list[Chunk]]:
    """Which bank holds which chunk from now on, and those chunks in the order of need.

    The first chunks needed, as many as there are banks, are held. On the order of training, up
    through the layers and down again, no choice needs fewer uploads if the banks hold whole
    layers. A chunk that is in a bank stays in it.
    """
    wanted: dict[Chunk, None] = {}
    for chunk in needed:
        wanted.setdefault(chunk)
        if len(wanted) == len(held):
            break
    banks: list[Chunk | None] = [chunk if chunk in wanted else None for chunk in held]
    present = {chunk for chunk in banks if chunk is not None}
    missing = iter([chunk for chunk in wanted if chunk not in present])
    for number, kept in enumerate(banks):
        if kept is None:
            # an unneeded chunk keeps its bank (its uploads may serve later) until one is missing
            banks[number] = next(missing, None) or held[number]
    return banks, list(wanted)
