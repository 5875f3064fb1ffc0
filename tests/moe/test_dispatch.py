"""The local dispatcher against masks over all assignments, forward and backward."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from overspill.core.expert_map import ExpertMap
from overspill.moe.dispatch import LocalDispatcher, RoutedRows

N_EXPERTS, D = 5, 6
CPU = torch.device("cpu")
FEW, MANY = 23, 5000  # tokens; with top-2 the latter are more rows than are sorted on the host
CASES = {
    "few rows": (FEW, 2, False),
    "few rows, top-1": (FEW, 1, False),
    "few rows, some without an expert": (FEW, 2, True),
    "many rows": (MANY, 2, False),
    "many rows, some without an expert": (MANY, 2, True),
}
LAST = [frozenset(), frozenset({1, 4}), frozenset({0})]


def routing(n_tokens: int, top_k: int, drops: bool) -> Tensor:
    """Expert ids [T, K]. Expert 3 gets no token; with `drops` some ids mean "no expert"."""
    scores = torch.rand(n_tokens, N_EXPERTS)
    scores[:, 3] = -1
    ids = scores.topk(top_k).indices
    if drops:
        ids[torch.rand(ids.shape) < 0.3] = N_EXPERTS
    return ids


def routed(
    case: str, last: frozenset[int], resort: bool
) -> tuple[LocalDispatcher, RoutedRows, Tensor]:
    n_tokens, top_k, drops = CASES[case]
    ids = routing(n_tokens, top_k, drops)
    dispatcher = LocalDispatcher([ExpertMap.whole(N_EXPERTS)], CPU)
    order = dispatcher.route(0, ids, drops, need_counts=True, may_resort=resort)
    if resort:
        dispatcher.sort(order, last)
    return dispatcher, order, ids


def by_mask(
    x: Tensor, weights: Tensor, ids: Tensor, experts: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The oracle: every expert sees every token and a mask keeps its own."""
    y = torch.zeros_like(x)
    for expert in range(N_EXPERTS):
        weight = (weights * (ids == expert)).sum(1, keepdim=True)
        y = y + experts(expert, x) * weight
    return y


def experts_order(last: frozenset[int]) -> list[int]:
    return [e for e in range(N_EXPERTS) if e not in last] + sorted(last)


@pytest.mark.parametrize(("resort", "last"), [(False, LAST[0]), *((True, last) for last in LAST)])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_sorted_by_expert(case: str, resort: bool, last: frozenset[int]) -> None:
    dispatcher, order, ids = routed(case, last, resort)
    assert order.counts == [(ids == expert).sum().item() for expert in range(N_EXPERTS)]
    assert order.n_routed == sum(order.counts)
    x = torch.randn(len(ids), D)
    weights = torch.rand(ids.shape)
    start = 0
    for expert in experts_order(last):
        token, k = (ids == expert).nonzero(as_tuple=True)
        stop = start + len(token)
        rows = dispatcher.dispatch(order, x, start, stop)
        found = torch.cat([rows, dispatcher.row_weights(order, weights, start, stop)[:, None]], 1)
        expected = torch.cat([x[token], weights[token, k][:, None]], 1)
        assert torch.equal(_sorted(found), _sorted(expected))
        start = stop


def _sorted(rows: Tensor) -> Tensor:
    """Rows in an order of their own: within an expert any order is right."""
    return rows[rows[:, 0].argsort()]


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_are_those_of_the_mask(case: str, last: frozenset[int]) -> None:
    dispatcher, order, ids = routed(case, last, resort=True)
    assert order.counts is not None
    scales = torch.randn(N_EXPERTS, D)
    x = torch.randn(len(ids), D, requires_grad=True)
    weights = torch.rand(ids.shape, requires_grad=True)
    expected = by_mask(x, weights, ids, lambda expert, rows: rows * scales[expert])
    dy = torch.randn_like(expected)
    expected.backward(dy)

    y = torch.full((order.n_rows, D), torch.nan)  # rows without an expert are never computed
    dx, dweight = y.clone(), y[:, 0].clone()
    start = 0
    with torch.no_grad():
        for expert in experts_order(last):
            stop = start + order.counts[expert]
            rows = dispatcher.dispatch(order, x, start, stop)
            row_dy = dispatcher.dispatch(order, dy, start, stop)
            weight = dispatcher.row_weights(order, weights, start, stop)
            y[start:stop] = rows * scales[expert]
            dx[start:stop] = row_dy * weight[:, None] * scales[expert]
            dweight[start:stop] = (row_dy * y[start:stop]).sum(1)
            start = stop
        torch.testing.assert_close(dispatcher.combine(order, y, weights), expected)
        dx_TD, dweights_TK = dispatcher.combine_grads(order, dx, dweight)
    torch.testing.assert_close(dx_TD, x.grad)
    torch.testing.assert_close(dweights_TK, weights.grad)


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_sorted_anew_combine_as_before(case: str) -> None:
    """Backward may give the CPU other experts than forward."""
    dispatcher, order, ids = routed(case, frozenset({2}), resort=True)
    x, weights = torch.randn(len(ids), D), torch.rand(ids.shape)
    combined = []
    for last in (order.last, frozenset({0, 4})):
        dispatcher.sort(order, last)
        assert order.last == last
        rows = dispatcher.dispatch(order, x, 0, order.n_rows)
        combined.append(dispatcher.combine(order, rows, weights))
    torch.testing.assert_close(*combined)


def test_pieces_of_the_rows_are_those_of_the_whole() -> None:
    dispatcher, order, ids = routed("few rows", frozenset(), resort=False)
    x = torch.randn(len(ids), D)
    whole = dispatcher.dispatch(order, x, 0, order.n_rows)
    borders = [0, 5, 6, 31, order.n_rows]
    pieces = [dispatcher.dispatch(order, x, a, b) for a, b in itertools.pairwise(borders)]
    assert torch.equal(torch.cat(pieces), whole)
    assert order.ends_E.tolist() == list(itertools.accumulate(order.counts or []))


def test_counts_are_left_on_the_device_where_the_host_does_not_need_them() -> None:
    dispatcher = LocalDispatcher([ExpertMap.whole(N_EXPERTS)], CPU)
    ids = routing(FEW, 2, drops=False)
    assert dispatcher.route(0, ids, False, need_counts=False, may_resort=False).counts is None
    assert dispatcher.route(0, ids, False, need_counts=True, may_resort=False).counts is not None


def test_ids_are_global_where_other_processes_hold_experts_too() -> None:
    dispatcher = LocalDispatcher([ExpertMap.part(5, 1, 2)], CPU)  # experts 3 and 4
    ids = torch.tensor([[4], [3], [4]])
    order = dispatcher.route(0, ids, False, need_counts=False, counts={3: 1, 4: 2})
    assert order.counts == [1, 2]
    assert order.permutation.row_token_R.tolist() == [1, 0, 2]
    assert order.ends_E.tolist() == [1, 3]
