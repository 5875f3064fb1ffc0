"""Fewer combinations of parameters leave out no pair of values."""

from itertools import combinations, product

import pytest

from tests.pairs import all_pairs


@pytest.mark.parametrize(
    ("sizes", "most"), [((3, 2), 6), ((3, 2, 2), 6), ((3, 2, 4), 12), ((3, 3, 3), 10)]
)
def test_each_value_meets_each_value_of_every_other_axis(sizes: tuple[int, ...], most: int) -> None:
    axes = [[f"{axis}{n}" for n in range(size)] for axis, size in zip("abcd", sizes, strict=False)]
    rows = all_pairs(*axes)
    met = {pair for row in rows for pair in combinations(row, 2)}
    assert met == {pair for a, b in combinations(axes, 2) for pair in product(a, b)}
    assert len(rows) <= most


def test_what_is_not_allowed_is_left_out() -> None:
    rows = all_pairs("xyz", "xyz", [0, 1], allowed=lambda a, b, _: a != b)
    assert {(a, b) for a, b, _ in rows} == {(a, b) for a in "xyz" for b in "xyz" if a != b}
    assert {(a, n) for a, _, n in rows} == set(product("xyz", [0, 1]))
