"""Experts computed in waves, and the expected results by autograd through a naive loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from overspill.compute.activation import Differentiated, Fused
from overspill.compute.dropout import Dropout, Site
from overspill.compute.experts import WaveGrads, split_records, wave_backward, wave_forward
from overspill.compute.permute import (
    Permutation,
    combine,
    counts_of,
    gather_rows,
    row_weights,
    sum_rows,
    weights_grad,
)
from overspill.compute.reference import moe_reference
from overspill.core.experts import ExpertShape

N_EXPERTS = 6


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
    dropout: Dropout | None = None

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
        # the stride is longer than a record, as for slots in a slab
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
    """An activation as in some models: interleaved, clamped, shifted."""
    gate, up = h[..., ::2].clamp(max=1.0), h[..., 1::2].clamp(-1.0, 1.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.7)


def by_autograd(case: Case) -> Results:
    own = [w.clone().requires_grad_() for w in split_records(case.records, case.shape)]
    x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
    w_in, w_out, *biases = own
    if case.shape.transposed:
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    if case.dropout:
        y = dropout_reference(x, case, weights, w_in, w_out, biases)
    else:
        matrices = w_in, w_out, case.shape.gated
        y = moe_reference(x, case.ids, weights, *matrices, biases, case.activation)
    y.backward(case.dy)
    grads = [p.grad for p in (x, weights, *own)]
    assert all(grad is not None for grad in grads)
    dx, dweights, *dw = grads
    return Results(y.detach(), dx, dweights, dw)  # type: ignore[arg-type]


def dropout_reference(
    x: Tensor, case: Case, weights: Tensor, w_in: Tensor, w_out: Tensor, biases: list[Tensor]
) -> Tensor:
    function = case.activation or Fused(case.shape.gated).forward
    b_in, b_out = biases or (w_in.new_zeros(N_EXPERTS, 1), w_out.new_zeros(N_EXPERTS, 1))
    out = torch.zeros_like(x)
    assert case.dropout is not None
    rate = case.dropout.hidden
    for expert in range(N_EXPERTS):
        token, k = (case.ids == expert).nonzero(as_tuple=True)
        a = function(x[token] @ w_in[expert].t() + b_in[expert])
        dropped = case.dropout.of_rows(Site.HIDDEN, token * case.ids.shape[1] + k)
        assert dropped is not None
        a = a * dropped.mask(a.shape[1]) / (1 - rate) if rate < 1 else 0 * a
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
    counts = counts_of(permutation.ends_E).tolist()
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
        rows = permutation.row_assignment_R[start:stop]
        dropout = case.dropout and case.dropout.of_rows(Site.HIDDEN, rows)
        y, hidden = wave_forward(x, records, case.shape, ends, wave_counts, activation, dropout)
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
                dropout=dropout,
            )
        )
    return Results(
        combine(torch.cat(ys), case.weights, permutation),
        sum_rows(torch.cat([g.dx_RD for g in grads]), permutation),
        weights_grad(torch.cat([g.drow_weight_R for g in grads]), permutation),
        [torch.cat(parts) for parts in zip(*(g.dw for g in grads), strict=True)],
    )


LAYOUTS = {
    "biases": {"bias": True},
    "transposed": {"transposed": True},
    "all at once": {"bias": True, "transposed": True, "activation": clamped_gate},
    "own activation without gate": {"gated": False, "activation": lambda h: h.relu().square()},
}
