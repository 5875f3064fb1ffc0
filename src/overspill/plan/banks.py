"""Banks: the GPU slots are divided into banks of equal size. Each bank holds a chunk, a run of
adjacent experts of one layer. Experts adjacent in a layer are then adjacent in memory, so that they
can compute as one wave."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Experts [part * bank size, (part + 1) * bank size) of a layer."""

    layer: int
    part: int


def bank_size(slots: int, n_experts: int) -> int:
    """Experts per bank. Three slots or more give at least three banks, so that uploads fill some
    while one computes. A bank is at most one layer; the chunks of a layer are of similar size."""
    longest = min(n_experts, max(1, slots // 3))
    parts = -(-n_experts // longest)
    return -(-n_experts // parts)


def assign_banks(
    held: Sequence[Chunk | None], needed: Iterable[Chunk]
) -> tuple[list[Chunk | None], list[Chunk]]:
    """The chunk for each bank, and the needed chunks among them in the order of need.

    The banks hold the chunks needed first. In training (forward, then backward through the layers)
    no other choice needs fewer uploads if the banks hold whole layers. A chunk never changes its
    bank.
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
            # an unneeded chunk keeps its bank, because it may be needed later, until one is missing
            banks[number] = next(missing, None) or held[number]
    return banks, list(wanted)
