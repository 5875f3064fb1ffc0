"""Parameters that are run by hand (`-m slow`): other ones of the same test run the same code."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def slow_rows(rows: Iterable[Any], *numbers: int) -> list[Any]:
    """The rows of a test's parameters; those with these numbers, from 0, are slow."""
    found = [row if isinstance(row, tuple) else (row,) for row in rows]
    assert all(number < len(found) for number in numbers), "there are fewer rows"
    return [
        pytest.param(*row, marks=[pytest.mark.slow] if number in numbers else [])
        for number, row in enumerate(found)
    ]


def slow_names(names: Collection[str], *slow: str) -> list[Any]:
    """The names of a test's cases, some of which are slow."""
    assert not {*slow} - {*names}, "there are no such cases"
    return slow_rows(names, *(number for number, name in enumerate(names) if name in slow))


def chosen(request: pytest.FixtureRequest, cases: Mapping[str, T], *slow: str) -> dict[str, T]:
    """All cases but slow ones whose tests were deselected: one launch of ranks computes the cases
    of a file."""
    selected = {
        item.callspec.params.get("name")
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
        if hasattr(item, "callspec")
    }
    return {name: case for name, case in cases.items() if name in selected or name not in slow}
