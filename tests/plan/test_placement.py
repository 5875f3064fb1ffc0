"""Placement of experts on several GPUs: every row once, never slower than static, balanced."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.expert_map import ExpertMap
from overspill.plan.placement import (
    PlacementCosts,
    balance,
    dynamic_rows,
    layer_seconds,
    outbox_slots,
    owners,
    shared_parts,
    static_rows,
)

FREE = PlacementCosts(upload=0.0, row=1.0)

tokens = st.lists(
    st.integers(0, 50) | st.integers(0, 100_000) | st.just(0), min_size=1, max_size=40
)
costs = st.builds(
    PlacementCosts,
    upload=st.floats(0, 1e5),
    row=st.sampled_from([1e-9, 1.0, 7.3]),
    wait=st.just(0.0) | st.floats(0, 1e5),
)


@given(tokens, st.integers(1, 8), costs, st.booleans())
def test_every_token_row_is_assigned_once(
    tokens: list[int], n_gpus: int, costs: PlacementCosts, resident: bool
) -> None:
    for rows_GE in (
        static_rows(tokens, n_gpus),
        dynamic_rows(tokens, n_gpus, costs, resident),
    ):
        assert rows_GE.shape == (n_gpus, len(tokens))
        assert (rows_GE >= 0).all()
        assert rows_GE.sum(0).tolist() == tokens


@given(tokens, st.integers(1, 8), costs, st.booleans())
def test_dynamic_placement_is_never_slower_than_static(
    tokens: list[int], n_gpus: int, costs: PlacementCosts, resident: bool
) -> None:
    static_GE = static_rows(tokens, n_gpus)
    rows_GE = dynamic_rows(tokens, n_gpus, costs, resident)
    if not np.array_equal(rows_GE, static_GE):
        seconds = layer_seconds(rows_GE, costs, resident) + costs.wait
        assert seconds < layer_seconds(static_GE, costs, resident)


@given(tokens, st.integers(1, 8), costs, st.booleans())
def test_equal_counts_give_equal_placements(
    tokens: list[int], n_gpus: int, costs: PlacementCosts, resident: bool
) -> None:
    first = dynamic_rows(tokens, n_gpus, costs, resident)
    again = dynamic_rows(np.array(tokens, np.int32), n_gpus, costs, resident)
    assert np.array_equal(first, again)


def test_another_process_computes_the_same_placement() -> None:
    program = (
        "from overspill.plan.placement import *\n"
        "tokens = [(7 * e * e) % 501 for e in range(64)] + [9000]\n"
        "print(dynamic_rows(tokens, 4, PlacementCosts(0.3, 0.001)).tolist())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout != ""


@given(tokens, st.integers(2, 8), st.floats(0, 1e5))
def test_uploads_are_at_most_one_per_expert_and_one_per_further_gpu(
    tokens: list[int], n_gpus: int, upload: float
) -> None:
    rows_GE = dynamic_rows(tokens, n_gpus, PlacementCosts(upload, 1.0))
    assert (rows_GE > 0).sum() <= np.count_nonzero(tokens) + n_gpus - 1


@given(st.lists(st.integers(1000, 100_000), min_size=1, max_size=40), st.integers(2, 8))
def test_rows_are_balanced_where_uploads_cost_nothing(tokens: list[int], n_gpus: int) -> None:
    for resident in (False, True):
        assert balance(dynamic_rows(tokens, n_gpus, FREE, resident)) <= 1.03


def test_experts_go_to_the_least_busy_gpu_the_longest_first() -> None:
    rows_GE = dynamic_rows([70, 60, 50, 40, 30, 20], 2, PlacementCosts(45.0, 1.0))
    # static: 180 and 90; longest first: 70, 60; 50 to the second, 40 to the first, 30, 20
    assert rows_GE.tolist() == [[70, 0, 0, 40, 30, 0], [0, 60, 50, 0, 0, 20]]


def test_an_expert_with_most_of_the_rows_is_split() -> None:
    tokens = [600, 58, 57, 57, 57, 57, 57, 57]
    rows_GE = dynamic_rows(tokens, 4, PlacementCosts(upload=10.0, row=1.0))
    assert balance(static_rows(tokens, 4)) > 2.6
    assert balance(rows_GE) <= 1.01
    assert (rows_GE[:, 0] > 0).sum() > 1
    assert ((rows_GE[:, 1:] > 0).sum(0) == 1).all()  # no other expert is uploaded twice


def test_an_expert_is_not_split_if_uploads_take_longer_than_its_rows() -> None:
    rows_GE = dynamic_rows([600, 60, 60, 60], 2, PlacementCosts(upload=400.0, row=1.0))
    assert ((rows_GE > 0).sum(0) == 1).all()


def test_uploads_are_balanced_where_they_take_longest() -> None:
    tokens = [40, 30, 20, 10, 0, 0, 0, 0]
    rows_GE = dynamic_rows(tokens, 4, PlacementCosts(upload=1000.0, row=1.0))
    assert (rows_GE > 0).sum(1).tolist() == [1, 1, 1, 1]  # static: two GPUs upload two each


def test_balanced_counts_and_a_long_wait_keep_experts_at_their_owners() -> None:
    even, uneven = [100] * 8, [400, 400, 0, 0, 100, 100, 0, 0]
    waiting = PlacementCosts(upload=1.0, row=1.0, wait=600.0)
    assert np.array_equal(dynamic_rows(even, 4, FREE), static_rows(even, 4))
    assert np.array_equal(dynamic_rows(uneven, 4, waiting), static_rows(uneven, 4))


def test_resident_experts_only_give_rows_to_other_gpus() -> None:
    tokens = [600, 58, 57, 57, 57, 57, 57, 57]
    rows_GE = dynamic_rows(tokens, 4, PlacementCosts(upload=10.0, row=1.0), resident=True)
    assert balance(rows_GE) <= 1.01
    at_owners = rows_GE[owners(8, 4), np.arange(8)]
    assert (at_owners[1:] == tokens[1:]).all()


def test_experts_that_do_not_divide_evenly_have_owners_with_one_more() -> None:
    assert np.bincount(owners(10, 4)).tolist() == [3, 3, 2, 2]
    assert owners(2, 4).tolist() == [0, 1]


def test_owners_are_those_of_the_experts_of_ranks() -> None:
    for n_experts, n_gpus in ((6, 4), (7, 3), (64, 8)):
        parts = [ExpertMap.part(n_experts, gpu, n_gpus) for gpu in range(n_gpus)]
        want = [gpu for gpu, part in enumerate(parts) for _ in part.local_ids]
        assert owners(n_experts, n_gpus).tolist() == want


def test_gradients_of_experts_that_owners_do_not_compute_alone_need_slots() -> None:
    rows_GE = np.array([[5, 0, 3, 0], [0, 4, 3, 0]])  # GPU 0 owns experts 0 and 1
    assert shared_parts(rows_GE).tolist() == [1, 2]
    assert outbox_slots(5, 2) == 5
    assert outbox_slots(64, 4) == 22


def test_no_tokens_no_experts_and_one_gpu_are_placed_too() -> None:
    assert dynamic_rows([0, 0], 2, FREE).tolist() == [[0, 0], [0, 0]]
    assert dynamic_rows([], 2, FREE).shape == (2, 0)
    assert dynamic_rows([3, 5], 1, FREE).tolist() == [[3, 5]]
    assert balance(static_rows([0, 0], 2)) == 1.0


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="n_gpus=0"):
        dynamic_rows([1], 0, FREE)
    with pytest.raises(ValueError, match="at least 0"):
        dynamic_rows([1, -1], 2, FREE)
    with pytest.raises(ValueError, match="one number"):
        dynamic_rows(np.ones((2, 2), int), 2, FREE)
    for wrong in ({"upload": -1.0}, {"row": 0.0}, {"wait": float("nan")}):
        with pytest.raises(ValueError, match="costs must"):
            PlacementCosts(**{"upload": 1.0, "row": 1.0} | wrong)
