"""Sorting tokens into token rows and back."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.compute.permute import (
    Permutation,
    combine,
    count_rows,
    counts_of,
    gather_rows,
    row_weights,
    sum_rows,
    weights_grad,
)


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    n_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(4, n_experts)))
    n_tokens = draw(st.integers(0, 30))
    order = st.permutations(range(n_experts))
    ids = [draw(order)[:top_k] for _ in range(n_tokens)]
    return torch.tensor(ids, dtype=torch.int64).reshape(n_tokens, top_k), n_experts


@given(routings())
def test_rows_are_sorted_by_expert_and_tokens_stay_in_order(
    routing: tuple[torch.Tensor, int],
) -> None:
    ids, n_experts = routing
    permutation = Permutation.build(ids, n_experts)
    flat = ids.reshape(-1).tolist()
    naive = sorted(range(len(flat)), key=lambda index: (flat[index], index))
    assert permutation.row_assignment_R.tolist() == naive
    assert permutation.row_token_R.tolist() == [index // ids.shape[1] for index in naive]
    counts = [flat.count(e) for e in range(n_experts)]
    assert counts_of(permutation.ends_E).tolist() == counts
    assert permutation.ends_E.tolist() == list(itertools.accumulate(counts))
    assert permutation.ends_E.dtype is torch.int32


@given(routings(), st.data())
def test_rows_of_last_experts_follow_all_others_and_are_not_counted(
    routing: tuple[torch.Tensor, int], data: st.DataObject
) -> None:
    ids, n_experts = routing
    last = data.draw(st.sets(st.integers(0, n_experts - 1)))
    dropped = data.draw(st.booleans())
    if dropped and len(ids):
        ids = ids.clone()
        ids[0, -1] = n_experts  # no expert
    flat = ids.reshape(-1).tolist()
    counts = [flat.count(e) for e in range(n_experts)]
    assert count_rows(ids, n_experts).tolist() == counts
    permutation = Permutation.with_counts(ids, counts, last)
    same = Permutation.on_host(ids, counts, last, torch.device("cpu"))
    for one, other in zip(vars(permutation).values(), vars(same).values(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype

    def rank(index: int) -> tuple[bool, bool, int, int]:
        return flat[index] == n_experts, flat[index] in last, flat[index], index

    assert permutation.row_assignment_R.tolist() == sorted(range(len(flat)), key=rank)
    kept = [0 if e in last else count for e, count in enumerate(counts)]
    assert permutation.ends_E.tolist() == torch.tensor(kept).cumsum(0).tolist()
    assert permutation.ends_E.dtype is torch.int32
    assert sorted(permutation.inverse_TK.reshape(-1).tolist()) == list(range(len(flat)))


@given(routings())
def test_inverse_and_assignment_are_inverse(routing: tuple[torch.Tensor, int]) -> None:
    ids, n_experts = routing
    permutation = Permutation.build(ids, n_experts)
    rows = torch.arange(ids.numel())
    assert permutation.inverse_TK.shape == ids.shape
    assert torch.equal(permutation.inverse_TK.reshape(-1)[permutation.row_assignment_R], rows)
    assert torch.equal(permutation.row_assignment_R[permutation.inverse_TK.reshape(-1)], rows)


@given(routings())
def test_combined_rows_are_sums_over_their_tokens(routing: tuple[torch.Tensor, int]) -> None:
    ids, n_experts = routing
    permutation = Permutation.build(ids, n_experts)
    x = torch.randn(ids.shape[0], 5, dtype=torch.float64)
    weights = torch.rand(ids.shape, dtype=torch.float64)
    rows = gather_rows(x, permutation)
    torch.testing.assert_close(combine(rows, weights, permutation), x * weights.sum(1, True))
    torch.testing.assert_close(sum_rows(rows, permutation), x * ids.shape[1])
    assert torch.equal(weights_grad(row_weights(weights, permutation), permutation), weights)


@given(routings(), st.data())
def test_any_slice_of_rows_can_be_gathered(
    routing: tuple[torch.Tensor, int], data: st.DataObject
) -> None:
    ids, n_experts = routing
    permutation = Permutation.build(ids, n_experts)
    start = data.draw(st.integers(0, ids.numel()))
    stop = data.draw(st.integers(start, ids.numel()))
    x = torch.randn(ids.shape[0], 3)
    weights = torch.rand(ids.shape)
    assert torch.equal(
        gather_rows(x, permutation, start, stop), gather_rows(x, permutation)[start:stop]
    )
    assert torch.equal(
        row_weights(weights, permutation, start, stop),
        row_weights(weights, permutation)[start:stop],
    )


def test_combine_sums_bf16_rows_in_float32_and_rounds_once() -> None:
    ids = torch.tensor([[0, 1, 2, 3]])
    permutation = Permutation.build(ids, 4)
    # In bf16, 256 + 1 is 256.
    y = torch.tensor([[256.0], [1.0], [1.0], [2.0]], dtype=torch.bfloat16)
    out = combine(y, torch.ones(1, 4), permutation)
    assert out.dtype is torch.bfloat16
    assert out.item() == 260.0
    assert sum_rows(y, permutation).item() == 260.0


def test_combine_does_not_depend_on_how_tokens_are_divided() -> None:
    ids = torch.rand(37, 8).topk(2).indices
    permutation = Permutation.build(ids, 8)
    y, weights = torch.randn(74, 16), torch.rand(37, 2)
    whole = combine(y, weights, permutation)
    assert torch.equal(combine(y, weights, permutation, rows_at_once=10), whole)


@given(routings(), st.integers(0, 9))
def test_rows_may_begin_with_any_number(routing: tuple[torch.Tensor, int], first: int) -> None:
    ids, n_experts = routing
    own = Permutation.build(ids, n_experts)
    shifted = replace(own, inverse_TK=own.inverse_TK + first)
    y, weights = torch.randn(ids.numel(), 3), torch.rand(ids.shape)
    assert torch.equal(combine(y, weights, shifted, first=first), combine(y, weights, own))
    assert torch.equal(sum_rows(y, shifted, first=first), sum_rows(y, own))


DEVICES = ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("dtype", "top_k"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_the_kernel_sums_the_rows_of_each_token(
    device: str, weighted: bool, dtype: torch.dtype, top_k: int
) -> None:
    pytest.importorskip("triton")
    if device == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("needs Triton's interpreter, which serves machines without a GPU")
        device = "cpu"
    from overspill.compute.permute_triton import sum_over_k

    n_tokens, d_model = 9, 1030  # two blocks of columns
    order = Permutation.build(torch.rand(n_tokens, 5).topk(top_k).indices.to(device), 5)
    y = torch.randn(n_tokens * top_k, d_model).to(device, dtype)
    weights = torch.rand(n_tokens, top_k, device=device) if weighted else None
    out = y.new_full((n_tokens, d_model), torch.nan)
    sum_over_k(y, order.inverse_TK, weights, out, 0)
    part = torch.empty_like(out)
    sum_over_k(y, order.inverse_TK + 7, weights, part, 7)
    assert torch.equal(part, out)
    rows = y.double()[order.inverse_TK]
    want = (rows if weights is None else rows * weights.double().unsqueeze(-1)).sum(1)
    tolerance = 1e-6 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_on_a_gpu_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    ids = torch.rand(37, 8).topk(3).indices
    wide = torch.promote_types(dtype, torch.float32)
    y, weights = torch.randn(111, 48).to(dtype), torch.rand(37, 3, dtype=wide)
    here, there = (Permutation.build(ids.to(device), 8) for device in ("cpu", "cuda"))
    out = torch.empty(80, 48, dtype=dtype, device="cuda")  # of which every other row is written
    for result in (None, out[:37], out[::2][:37]):
        combined = combine(y.cuda(), weights.cuda(), there, out=result)
        torch.testing.assert_close(combined.cpu(), combine(y, weights, here))
        torch.testing.assert_close(sum_rows(y.cuda(), there, result).cpu(), sum_rows(y, here))
    some = slice(3, 30)  # not aligned to 16 bytes
    part = combine(y.cuda(), weights.cuda()[some], there.of_tokens(some))
    assert torch.equal(part, combine(y.cuda(), weights.cuda(), there)[some])
