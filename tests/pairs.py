"""Parameters of a test in few combinations."""

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
    pairs = [set(combinations(enumerate(row), 2)) for row in numbers]
    missing = set().union(*pairs)
    chosen = set()
    while missing:
        best = max(range(len(rows)), key=lambda n: len(pairs[n] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [rows[n] for n in sorted(chosen)]
