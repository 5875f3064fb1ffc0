"""Waves of experts, forward and backward, against autograd through the naive loop."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from overspill.compute.experts import WaveGrads, split_records, wave_backward, wave_forward
from overspill.compute.permute import (
    Permutation,
    combine,
    gather_rows,
    row_weights,
    sum_rows,
    weights_grad,
)
from overspill.compute.reference import moe_reference
from overspill.core.experts import ExpertShape

N_EXPERTS = 6
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def route(kind: str, n_tokens: int, top_k: int) -> Tensor:
    """Expert ids [T, K]."""
    scores = torch.rand(n_tokens, N_EXPERTS)
    if kind == "some without tokens":
        scores[:, [0, 3]] = -1
    if kind == "all to the same":
        scores[:, 1 : 1 + top_k] = 2
    return scores.topk(top_k).indices


@dataclass
class Case:
    x: Tensor
    ids: Tensor
    weights: Tensor
    records: Tensor
    shape: ExpertShape
    dy: Tensor

    @classmethod
    def make(
        cls,
        kind: str = "even",
        top_k: int = 2,
        gated: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        padding: int = 24,
        d_model: int = 16,
        d_hidden: int = 32,
        n_tokens: int = 41,
    ) -> "Case":
        shape = ExpertShape(d_model, d_hidden, gated)
        # Rows of the records are longer than a record: the stride of slots in a slab.
        slab = 0.1 * torch.randn(N_EXPERTS, shape.numel + padding)
        return cls(
            torch.randn(n_tokens, d_model).to(device, dtype),
            route(kind, n_tokens, top_k).to(device),
            torch.rand(n_tokens, top_k).to(device, torch.promote_types(dtype, torch.float32)),
            slab.to(device, dtype)[:, : shape.numel],
            shape,
            torch.randn(n_tokens, d_model).to(device, dtype),
        )


@dataclass
class Results:
    y: Tensor
    dx: Tensor
    dweights: Tensor
    dw_in: Tensor
    dw_out: Tensor

    def assert_close(self, other: "Results", rtol: float, atol: float) -> None:
        for name in ("y", "dx", "dweights", "dw_in", "dw_out"):
            mine, theirs = getattr(self, name), getattr(other, name)
            torch.testing.assert_close(
                mine, theirs.to(mine.dtype), rtol=rtol, atol=atol, msg=f"{name} is off"
            )

    def assert_equal(self, other: "Results") -> None:
        for name in ("y", "dx", "dweights", "dw_in", "dw_out"):
            assert torch.equal(getattr(self, name), getattr(other, name)), name


def by_autograd(case: Case) -> Results:
    w_in, w_out = (w.clone().requires_grad_() for w in split_records(case.records, case.shape))
    x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
    y = moe_reference(x, case.ids, weights, w_in, w_out, case.shape.gated)
    y.backward(case.dy)
    grads = [p.grad for p in (x, weights, w_in, w_out)]
    assert all(grad is not None for grad in grads)
    return Results(y.detach(), *grads)  # type: ignore[arg-type]


def by_waves(
    case: Case,
    borders: tuple[int, ...] = (0, N_EXPERTS),
    keep_hidden: bool = False,
    host_counts: bool = True,
) -> Results:
    permutation = Permutation.build(case.ids, N_EXPERTS)
    counts = permutation.counts_E.tolist()
    stops = [0, *accumulate(counts)]
    ys: list[Tensor] = []
    grads: list[WaveGrads] = []
    for first, last in pairwise(borders):
        start, stop = stops[first], stops[last]
        records = case.records[first:last]
        ends = (permutation.ends_E[first:last] - start).to(torch.int32)
        wave_counts = counts[first:last] if host_counts else None
        x = gather_rows(case.x, permutation, start, stop)
        y, hidden = wave_forward(x, records, case.shape, ends, wave_counts)
        assert hidden.shape == (stop - start, case.shape.in_rows)
        ys.append(y)
        grads.append(
            wave_backward(
                x,
                gather_rows(case.dy, permutation, start, stop),
                row_weights(case.weights, permutation, start, stop),
                records,
                case.shape,
                ends,
                wave_counts,
                hidden if keep_hidden else None,
            )
        )
    return Results(
        combine(torch.cat(ys), case.weights, permutation),
        sum_rows(torch.cat([g.dx_RD for g in grads]), permutation),
        weights_grad(torch.cat([g.drow_weight_R for g in grads]), permutation),
        torch.cat([g.dw_in for g in grads if g.dw_in is not None]),
        torch.cat([g.dw_out for g in grads if g.dw_out is not None]),
    )


@pytest.mark.parametrize("kind", ["even", "some without tokens", "all to the same"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_waves_follow_autograd_through_the_naive_loop(
    kind: str, top_k: int, gated: bool, dtype: torch.dtype
) -> None:
    case = Case.make(kind, top_k, gated, dtype)
    tolerance = TOLERANCE[dtype]
    by_waves(case).assert_close(by_autograd(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gated", [False, True])
def test_bf16_waves_follow_float32_autograd(gated: bool) -> None:
    case = Case.make(gated=gated, dtype=torch.bfloat16)
    wide = Case(
        case.x.float(), case.ids, case.weights, case.records.float(), case.shape, case.dy.float()
    )
    # A bf16 has 8 bits: 2^-8 for each of the few roundings, of values of about one.
    by_waves(case).assert_close(by_autograd(wide), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n_tokens", [41, 301])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_cut_into_waves_gives_the_same_bits(
    gated: bool, n_tokens: int, dtype: torch.dtype
) -> None:
    case = Case.make("some without tokens", gated=gated, n_tokens=n_tokens, dtype=dtype)
    whole = by_waves(case)
    for cut in range(2 ** (N_EXPERTS - 1)):
        inner = tuple(e for e in range(1, N_EXPERTS) if cut >> (e - 1) & 1)
        by_waves(case, (0, *inner, N_EXPERTS)).assert_equal(whole)


def test_kept_and_recomputed_hidden_give_the_same_bits() -> None:
    case = Case.make()
    by_waves(case, keep_hidden=True).assert_equal(by_waves(case))


def test_counts_from_the_device_are_as_good() -> None:
    case = Case.make("some without tokens")
    by_waves(case, host_counts=False).assert_equal(by_waves(case))


def test_expert_without_rows_has_zero_gradient() -> None:
    grads = by_waves(Case.make("some without tokens"))
    for expert in (0, 3):
        assert not grads.dw_in[expert].any()
        assert not grads.dw_out[expert].any()


def test_rows_of_one_expert_can_be_cut_and_their_dw_added() -> None:
    case = Case.make(dtype=torch.float64)
    x, dy, weight = case.x, case.dy, case.weights[:, 0]
    record = case.records[:1]

    def backward(rows: slice) -> WaveGrads:
        n = x[rows].shape[0]
        ends = torch.tensor([n], dtype=torch.int32)
        return wave_backward(x[rows], dy[rows], weight[rows], record, case.shape, ends, [n])

    whole = backward(slice(None))
    parts = [backward(slice(0, 13)), backward(slice(13, 14)), backward(slice(14, None))]
    torch.testing.assert_close(torch.cat([p.dx_RD for p in parts]), whole.dx_RD)
    for name in ("dw_in", "dw_out"):
        total = sum(getattr(p, name) for p in parts)
        torch.testing.assert_close(total, getattr(whole, name))


def test_dw_is_left_out_when_not_needed() -> None:
    case = Case.make()
    n = case.x.shape[0]
    args = (case.records[:1], case.shape, torch.tensor([n], dtype=torch.int32), [n])
    grads = wave_backward(case.x, case.dy, case.weights[:, 0], *args, need_dw=False)
    full = wave_backward(case.x, case.dy, case.weights[:, 0], *args)
    assert grads.dw_in is None
    assert grads.dw_out is None
    assert torch.equal(grads.dx_RD, full.dx_RD)


def test_wave_without_rows_gives_empty_outputs_and_zero_gradients() -> None:
    case = Case.make()
    nothing = case.x[:0]
    ends = torch.zeros(2, dtype=torch.int32)
    y, _ = wave_forward(nothing, case.records[:2], case.shape, ends, [0, 0])
    assert y.shape == nothing.shape
    grads = wave_backward(
        nothing, nothing, case.weights[:0, 0], case.records[:2], case.shape, ends, [0, 0]
    )
    assert grads.dw_in is not None
    assert not grads.dw_in.any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["even", "some without tokens", "all to the same"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("host_counts", [False, True])
def test_grouped_kernels_follow_float32_autograd(
    kind: str, top_k: int, gated: bool, host_counts: bool
) -> None:
    case = Case.make(
        kind, top_k, gated, torch.bfloat16, "cuda", d_model=64, d_hidden=128, n_tokens=333
    )
    wide = Case(
        case.x.float(), case.ids, case.weights, case.records.float(), case.shape, case.dy.float()
    )
    expected = by_autograd(wide)
    # Dirty memory: what a kernel leaves out must not pass as zero because the page was fresh.
    dirt = torch.full((16 * 2**20,), float("nan"), device="cuda", dtype=torch.bfloat16)
    del dirt
    for borders in ((0, N_EXPERTS), (0, 1, 4, N_EXPERTS)):
        got = by_waves(case, borders, host_counts=host_counts)
        for name in ("y", "dx", "dweights", "dw_in", "dw_out"):
            mine, theirs = getattr(got, name).float(), getattr(expected, name)
            # Against the largest value: sums of hundreds of terms have no small relative error.
            assert (mine - theirs).abs().max() <= 2e-2 * theirs.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_float32_on_the_gpu_goes_through_the_loop(gated: bool) -> None:
    case = Case.make("some without tokens", gated=gated, device="cuda")
    by_waves(case).assert_close(by_autograd(case), rtol=1e-4, atol=1e-4)
