"""Swaps that make the experts with the most token rows in the last forward resident, as in the
expert pinning of ES-MoE."""

from collections.abc import Sequence
from typing import NamedTuple


class Swap(NamedTuple):
    """Two experts of a layer to swap, by their positions."""

    layer: int
    resident: int
    streamed: int


def swaps(
    rows: Sequence[Sequence[float] | None], residents: Sequence[int], most: int
) -> list[Swap]:
    """The swaps that bring the most token rows to the device, at most `most`. `rows` are those
    of the expert at each position of each layer, None if they are not known; the first `residents`
    positions are on the device."""
    found: list[tuple[float, Swap]] = []
    for layer, (own, count) in enumerate(zip(rows, residents, strict=True)):
        if own is None:
            continue
        light = sorted(range(count), key=own.__getitem__)
        heavy = sorted(range(count, len(own)), key=own.__getitem__, reverse=True)
        for a, b in zip(light, heavy, strict=False):
            if own[b] > own[a]:
                found.append((own[b] - own[a], Swap(layer, a, b)))
    found.sort(key=lambda pair: (-pair[0], pair[1]))
    return [swap for _, swap in found[:most]]
