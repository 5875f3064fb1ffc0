"""Waves of experts, forward and backward, against autograd through the naive loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from overspill.compute.activation import Differentiated, activate_torch
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
    activation: Callable[[Tensor], Tensor] | None = None

    def wide(self) -> "Case":
        return replace(self, x=self.x.float(), records=self.records.float(), dy=self.dy.float())

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
        bias: bool = False,
        transposed: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> "Case":
        shape = ExpertShape(d_model, d_hidden, gated, bias, transposed)
        # Rows of the records are longer than a record: the stride of slots in a slab.
        slab = 0.1 * torch.randn(N_EXPERTS, shape.numel + padding)
        return cls(
            torch.randn(n_tokens, d_model).to(device, dtype),
            route(kind, n_tokens, top_k).to(device),
            torch.rand(n_tokens, top_k).to(device, torch.promote_types(dtype, torch.float32)),
            slab.to(device, dtype)[:, : shape.numel],
            shape,
            torch.randn(n_tokens, d_model).to(device, dtype),
            activation,
        )


@dataclass
class Results:
    y: Tensor
    dx: Tensor
    dweights: Tensor
    dw: list[Tensor]

    def named(self) -> dict[str, Tensor]:
        fields = {"y": self.y, "dx": self.dx, "dweights": self.dweights}
        return fields | {f"dw {number}": grad for number, grad in enumerate(self.dw)}

    def assert_close(self, other: "Results", rtol: float, atol: float) -> None:
        for name, mine in self.named().items():
            theirs = other.named()[name]
            torch.testing.assert_close(
                mine, theirs.to(mine.dtype), rtol=rtol, atol=atol, msg=f"{name} is off"
            )

    def assert_equal(self, other: "Results") -> None:
        for name, mine in self.named().items():
            assert torch.equal(mine, other.named()[name]), name


def clamped_gate(h: Tensor) -> Tensor:
    """An activation like those some models bring: interleaved, clamped, shifted."""
    gate, up = h[..., ::2].clamp(max=1.0), h[..., 1::2].clamp(-1.0, 1.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.7)


def by_autograd(case: Case) -> Results:
    own = [w.clone().requires_grad_() for w in split_records(case.records, case.shape)]
    x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
    w_in, w_out, *biases = own
    if case.shape.transposed:
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    if not case.activation and not biases:
        y = moe_reference(x, case.ids, weights, w_in, w_out, case.shape.gated)
    else:
        y = general_reference(x, case, weights, w_in, w_out, biases)
    y.backward(case.dy)
    grads = [p.grad for p in (x, weights, *own)]
    assert all(grad is not None for grad in grads)
    dx, dweights, *dw = grads
    return Results(y.detach(), dx, dweights, dw)  # type: ignore[arg-type]


def general_reference(
    x: Tensor, case: Case, weights: Tensor, w_in: Tensor, w_out: Tensor, biases: list[Tensor]
) -> Tensor:
    function = case.activation or (lambda h: activate_torch(h, case.shape.gated))
    b_in, b_out = biases or (w_in.new_zeros(N_EXPERTS, 1), w_out.new_zeros(N_EXPERTS, 1))
    out = torch.zeros_like(x)
    for expert in range(N_EXPERTS):
        token, k = (case.ids == expert).nonzero(as_tuple=True)
        a = function(x[token] @ w_in[expert].t() + b_in[expert])
        y = a @ w_out[expert].t() + b_out[expert]
        out = out.index_add(0, token, (y * weights[token, k, None]).to(out.dtype))
    return out


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
        activation = None if case.activation is None else Differentiated(case.activation)
        y, hidden = wave_forward(x, records, case.shape, ends, wave_counts, activation)
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
                activation=activation,
            )
        )
    return Results(
        combine(torch.cat(ys), case.weights, permutation),
        sum_rows(torch.cat([g.dx_RD for g in grads]), permutation),
        weights_grad(torch.cat([g.drow_weight_R for g in grads]), permutation),
        [torch.cat(parts) for parts in zip(*(g.dw for g in grads), strict=True)],
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


LAYOUTS = {
    "biases": {"bias": True},
    "transposed": {"transposed": True},
    "all at once": {"bias": True, "transposed": True, "activation": clamped_gate},
    "own activation without gate": {"gated": False, "activation": lambda h: h.relu().square()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["even", "some without tokens"])
@pytest.mark.parametrize("keep_hidden", [False, True])
def test_any_layout_follows_autograd(layout: str, kind: str, keep_hidden: bool) -> None:
    case = Case.make(kind, dtype=torch.float64, **LAYOUTS[layout])
    expected = by_autograd(case)
    for borders in ((0, N_EXPERTS), (0, 1, 4, N_EXPERTS)):
        by_waves(case, borders, keep_hidden).assert_close(expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("host_counts", [False, True])
def test_grouped_kernels_take_any_layout(layout: str, host_counts: bool) -> None:
    sizes = {"d_model": 64, "d_hidden": 128, "n_tokens": 333}
    own = LAYOUTS[layout]
    if own.get("activation") is clamped_gate:  # at a clamp's edge bf16 and float32 take two sides
        own = own | {"activation": lambda h: (h[..., 1::2] + 1) * torch.tanh(h[..., ::2])}
    case = Case.make("some without tokens", dtype=torch.bfloat16, device="cuda", **sizes, **own)
    expected = by_autograd(case.wide())
    for borders in ((0, N_EXPERTS), (0, 1, 4, N_EXPERTS)):
        for name, mine in by_waves(case, borders, host_counts=host_counts).named().items():
            theirs = expected.named()[name]
            assert (mine.float() - theirs).abs().max() <= 2e-2 * theirs.abs().max(), name


@pytest.mark.parametrize("gated", [False, True])
def test_bf16_waves_follow_float32_autograd(gated: bool) -> None:
    case = Case.make(gated=gated, dtype=torch.bfloat16)
    # A bf16 has 8 bits: 2^-8 for each of the few roundings, of values of about one.
    by_waves(case).assert_close(by_autograd(case.wide()), rtol=3e-2, atol=3e-2)


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
        assert not any(grad[expert].any() for grad in grads.dw)


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
    for number, expected in enumerate(whole.dw):
        torch.testing.assert_close(sum(part.dw[number] for part in parts), expected)


def test_dw_is_left_out_when_not_needed() -> None:
    case = Case.make()
    n = case.x.shape[0]
    args = (case.records[:1], case.shape, torch.tensor([n], dtype=torch.int32), [n])
    grads = wave_backward(case.x, case.dy, case.weights[:, 0], *args, need_dw=False)
    full = wave_backward(case.x, case.dy, case.weights[:, 0], *args)
    assert grads.dw == ()
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
    assert len(grads.dw) == 2
    assert not any(grad.any() for grad in grads.dw)


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
    expected = by_autograd(case.wide())
    # Dirty memory: what a kernel leaves out must not pass as zero because the page was fresh.
    dirt = torch.full((16 * 2**20,), float("nan"), device="cuda", dtype=torch.bfloat16)
    del dirt
    for borders in ((0, N_EXPERTS), (0, 1, 4, N_EXPERTS)):
        got = by_waves(case, borders, host_counts=host_counts)
        for name, mine in got.named().items():
            theirs = expected.named()[name]
            # Against the largest value: sums of hundreds of terms have no small relative error.
            assert (mine.float() - theirs).abs().max() <= 2e-2 * theirs.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_float32_on_the_gpu_goes_through_the_loop(gated: bool) -> None:
    case = Case.make("some without tokens", gated=gated, device="cuda")
    by_waves(case).assert_close(by_autograd(case), rtol=1e-4, atol=1e-4)
