"""Which experts live on the compute device, if not all are used in every pass: the most used."""

import math
from collections.abc import Sequence
from typing import NamedTuple

_HORIZON = 32
"""Passes within which an exchange must have saved more transfers than it needs."""
_TRANSFERS = 2
"""Records that an exchange transfers, one in each direction."""
_DEVIATIONS = 5.0
"""Standard deviations by which two usages differ before they are taken to be different: experts
that are used alike do not exchange places again and again."""


class Exchange(NamedTuple):
    """Two experts of a layer that exchange places, by their positions."""

    layer: int
    home: int  # is at home on the device
    streamed: int


def exchanges(
    passes: Sequence[int], uses: Sequence[Sequence[int]], homes: Sequence[int], most: int
) -> list[Exchange]:
    """The exchanges that save the most uploads, at most `most`. Of the `passes` observed in each
    layer, the expert at each position had tokens in `uses`; the first `homes` positions are at home
    on the device. Each use of a streamed expert is one upload."""
    found: list[tuple[float, Exchange]] = []
    for layer, (total, own, count) in enumerate(zip(passes, uses, homes, strict=True)):
        home, streamed = own[:count], own[count:]
        if not home or not streamed or not _is_worthwhile(min(home), max(streamed), total):
            continue
        idle = sorted(range(count), key=own.__getitem__)
        busy = sorted(range(count, len(own)), key=own.__getitem__, reverse=True)
        for a, b in zip(idle, busy, strict=False):
            if not _is_worthwhile(own[a], own[b], total):
                break
            found.append(((own[b] - own[a]) / total, Exchange(layer, a, b)))
    found.sort(key=lambda pair: (-pair[0], pair[1]))
    return [exchange for _, exchange in found[:most]]


def _is_worthwhile(home: int, streamed: int, passes: int) -> bool:
    """Whether two experts should exchange places, by the passes in which they were used."""
    if (streamed - home) * _HORIZON <= _TRANSFERS * passes:
        return False
    # the expected share of a rare or frequent event is neither 0 nor 1 (Laplace's rule)
    shares = [(uses + 1) / (passes + 2) for uses in (home, streamed)]
    variance = sum(share * (1 - share) for share in shares) / passes
    return (streamed - home) / passes > _DEVIATIONS * math.sqrt(variance)
