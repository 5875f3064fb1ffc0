"""Which experts live on the compute device: those with the most token rows in the last forward, as
in the expert pinning of ES-MoE."""

from collections.abc import Sequence
from typing import NamedTuple


class Exchange(NamedTuple):
    """Two experts of a layer that exchange places, by their positions."""

    layer: int
    home: int  # is at home on the device
    streamed: int


def exchanges(
    rows: Sequence[Sequence[float] | None], homes: Sequence[int], most: int
) -> list[Exchange]:
    """The exchanges that bring the most token rows to the device, at most `most`. `rows` are those
    of the expert at each position of each layer, None if they are not known; the first `homes`
    positions are on the device."""
    found: list[tuple[float, Exchange]] = []
    for layer, (own, count) in enumerate(zip(rows, homes, strict=True)):
        if own is None:
            continue
        light = sorted(range(count), key=own.__getitem__)
        heavy = sorted(range(count, len(own)), key=own.__getitem__, reverse=True)
        for a, b in zip(light, heavy, strict=False):
            if own[b] > own[a]:
                found.append((own[b] - own[a], Exchange(layer, a, b)))
    found.sort(key=lambda pair: (-pair[0], pair[1]))
    return [exchange for _, exchange in found[:most]]
