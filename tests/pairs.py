"""Parameters of a test in few combinations."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(
    *axes: Sequence[Any], allowed: Callable[..., bool] = lambda *row: True
) -> list[tuple[Any, ...]]:
    """Combinations in which each value of an axis meets each value of every other axis. They are
    fewer than all combinations of three axes."""
    rows = [row for row in product(*axes) if allowed(*row)]
    numbers = [tuple(axis.index(v) for axis, v in zip(axes, row, strict=True)) for row in rows]
    bits: defaultdict[Any, int] = defaultdict(lambda: 1 << len(bits))  # one for each pair
    # a set of pairs is a number: there are thousands of rows
    pairs = [sum(bits[pair] for pair in combinations(enumerate(row), 2)) for row in numbers]
    missing = (1 << len(bits)) - 1
    chosen = set()
    while missing:
        best = max(range(len(rows)), key=lambda n: (pairs[n] & missing).bit_count())
        chosen.add(best)
        missing &= ~pairs[best]
    return [rows[n] for n in sorted(chosen)]
