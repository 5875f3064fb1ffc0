"""Experts are divided into groups of neighbours with about as many token rows each."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.errors import ConfigError
from overspill.plan.exchange_groups import Rows, check_groups, choose_groups, divide_experts


@st.composite
def rows_of_ranks(draw: st.DrawFn) -> tuple[Rows, Rows]:
    """Token rows of each expert on each rank, and an order of computation on each rank."""
    n_ranks, n_experts = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    rows = [[draw(st.integers(0, 50)) for _ in range(n_experts)] for _ in range(n_ranks)]
    orders = [draw(st.permutations(range(n_experts))) for _ in range(n_ranks)]
    return np.array(rows), np.array(orders)


@given(rows_of_ranks(), st.integers(1, 8))
def test_groups_are_neighbours_with_even_rows(ranks: tuple[Rows, Rows], n: int) -> None:
    groups_GE = divide_experts(*ranks, n)
    for rows, order, groups in zip(*ranks, groups_GE, strict=True):
        in_order = groups[order].tolist()
        assert in_order == sorted(in_order)
        assert set(in_order) <= set(range(n))
        for number in range(n):
            assert rows[groups == number].sum() <= rows.sum() / n + rows.max()


def test_as_many_groups_as_even_experts_have_one_expert_each() -> None:
    rows, order = np.full((1, 6), 9), np.array([[3, 1, 0, 2, 5, 4]])
    assert divide_experts(rows, order, 6)[0, order[0]].tolist() == [*range(6)]


@given(rows_of_ranks(), st.integers(1, 40), st.integers(1, 6))
def test_groups_have_the_least_rows_on_the_busiest_rank(
    ranks: tuple[Rows, Rows], least: int, most: int
) -> None:
    rows_GE, _ = ranks
    n = choose_groups(rows_GE, least, most)
    assert 1 <= n <= most
    assert n == 1 or rows_GE.sum(1).max() / n >= least


@given(rows_of_ranks())
def test_larger_batches_never_have_fewer_groups(ranks: tuple[Rows, Rows]) -> None:
    found = [choose_groups(ranks[0] * factor, 20) for factor in range(1, 6)]
    assert all(a <= b for a, b in itertools.pairwise(found))


def test_small_batches_are_one_group_and_large_ones_several() -> None:
    even = np.ones((2, 8), np.int64)
    assert choose_groups(even * 100) == 1
    assert choose_groups(even * 4096) == 2
    assert choose_groups(even * 4096, 4096, 4) == 4
    assert choose_groups(np.array([[100_000, 0, 0]])) == 1  # one expert cannot be divided


def test_more_groups_than_experts_of_a_rank_are_refused_by_name() -> None:
    check_groups(None, 5, 2)
    check_groups(3, 5, 2)
    with pytest.raises(ConfigError, match=r"exchange_groups=4 exceeds the 3 experts .* at most 3"):
        check_groups(4, 5, 2)
