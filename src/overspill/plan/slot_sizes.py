"""Sizes of the slots of a cache of experts whose records differ in size by layer."""

import itertools
from collections.abc import Iterator, Mapping


def slot_sizes(counts: Mapping[int, int]) -> Iterator[int]:
    """Yield the sizes of slots, without end. The first ones, however many, are divided among the
    sizes as the experts are: `counts` has the number of experts by the size of their record."""
    total, given = sum(counts.values()), dict.fromkeys(counts, 0)
    for number in itertools.count(1):
        # that of which most slots are missing; of several the largest, which any expert can use
        size = max(counts, key=lambda size: (number * counts[size] - total * given[size], size))
        given[size] += 1
        yield size


def most_slots(counts: Mapping[int, int], free: int) -> int:
    """Return how many of these slots fit into `free` bytes; no more than there are experts."""
    sizes = itertools.islice(slot_sizes(counts), sum(counts.values()))
    return sum(1 for used in itertools.accumulate(sizes) if used <= free)
