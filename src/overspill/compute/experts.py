"""Computes one wave: adjacent experts whose records are in adjacent slots.

Shapes: R token rows sorted by expert, D model, H hidden, n experts of the wave. `weights` is
[n, numel], one record per expert with any stride between records. `ends` (int32, on the device) are
the cumulative row counts inside the wave; `counts` are the row counts on the host.

A wave can contain a part of an expert's token rows: run one wave per part and add the dw.

A wave runs grouped kernels for all experts at once or loops over the experts, as chosen by
`grouped.backend_for`. The loop also computes the activation expert by expert, so that the results
of an expert are bitwise identical in any wave.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.compute import grouped
from overspill.compute.activation import Activation, Fused
from overspill.compute.dropout import RowDropout, with_dropout
from overspill.compute.low_rank import NO_ADAPTERS, Adapters, LowRank, LowRankGrads
from overspill.compute.weight_grad import Computed, Product, WeightGrad
from overspill.core.experts import ExpertShape


@dataclass(frozen=True)
class WaveGrads:
    dx_RD: Tensor
    dw: tuple[Tensor, ...]
    """Gradients [n, ...] of each tensor of a record, in the order of the record; empty without
    `need_dw`."""
    drow_weight_R: Tensor
    adapters: tuple[LowRankGrads | None, LowRankGrads | None] = (None, None)
    """Gradients of the low-rank parts of w_in and w_out, without the scale."""


TakeRows = Callable[[Tensor], None]
TakeGrad = Callable[[int, WeightGrad], None]
"""Function that receives the position of a tensor in a record and its gradient, [n, ...], without
biases."""


def split_records(weights: Tensor, shape: ExpertShape) -> tuple[Tensor, ...]:
    """Return views [n, ...] of the tensors in the records [n, numel]."""
    number, base, record = weights.shape[0], weights.storage_offset(), weights.stride(0)
    return tuple(
        weights.as_strided((number, *size), (record, *_strides(size)), base + start)
        for size, start in zip(shape.sizes, shape.starts, strict=True)
    )


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return (size[1], 1) if len(size) == 2 else (1,)


class StackedWeights(NamedTuple):
    """The two matrices of a wave's experts as stacks of their own, instead of records."""

    w_in: Tensor  # [n, H or 2H, D]
    w_out: Tensor  # [n, D, H]


@dataclass(frozen=True)
class _Parameters:
    """The tensors of a wave's records, with one orientation for all layouts."""

    w_in: Tensor  # [n, H or 2H, D]
    w_out: Tensor  # [n, D, H]
    b_in: Tensor | None
    b_out: Tensor | None

    @classmethod
    def of(cls, weights: Tensor | StackedWeights, shape: ExpertShape) -> "_Parameters":
        if isinstance(weights, StackedWeights):
            return cls(weights.w_in, weights.w_out, None, None)
        w_in, w_out, *biases = split_records(weights, shape)
        if shape.transposed:
            w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
        b_in, b_out = biases or (None, None)
        return cls(w_in, w_out, b_in, b_out)


@torch.no_grad()
def wave_forward(
    x_RD: Tensor,
    weights: Tensor | StackedWeights,
    shape: ExpertShape,
    ends: Tensor,
    counts: Sequence[int] | None = None,
    activation: Activation | None = None,
    dropout: RowDropout | None = None,
    adapters: Adapters = NO_ADAPTERS,
) -> tuple[Tensor, Tensor]:
    """Returns y [R, D] and hidden [R, H or 2H], the pre-activation, which backward can reuse.

    Routing weights are not applied. Without `counts` the loop waits for the device. The default
    `activation` is gated SiLU or GELU. `dropout` is applied after it; backward needs the same.
    """
    own = _Parameters.of(weights, shape)
    activation = activation or Fused(shape.gated)
    backend = grouped.backend_for(x_RD, own.w_in, shape, isinstance(weights, StackedWeights))
    if backend != "loop":
        hidden = _hidden_grouped(backend, x_RD, own, ends, adapters.w_in)
        a_RH = with_dropout(activation, dropout).forward(hidden)
        y_RD = grouped.product(backend, a_RH, own.w_out.transpose(1, 2), ends)
        if adapters.w_out is not None:
            adapters.w_out.add_product(y_RD, a_RH, backend, ends)
        return _add_bias(y_RD, own.b_out, ends), hidden
    y_RD = torch.empty_like(x_RD)
    hidden = x_RD.new_empty(x_RD.shape[0], shape.in_rows)
    for expert, rows in _expert_rows(ends, counts):
        low_in, low_out = adapters.part(expert, expert + 1)
        _linear(x_RD[rows], own.w_in[expert], own.b_in, expert, hidden[rows], low_in)
        a_RH = with_dropout(activation, dropout, rows).forward(hidden[rows])
        _linear(a_RH, own.w_out[expert], own.b_out, expert, y_RD[rows], low_out)
    return y_RD, hidden


@dataclass(frozen=True)
class _Backward:
    """Arguments of both implementations of `wave_backward`."""

    x_RD: Tensor
    dy_RD: Tensor
    row_weight_R: Tensor
    own: _Parameters
    shape: ExpertShape
    ends: Tensor
    counts: Sequence[int] | None
    hidden: Tensor | None
    need_dw: bool
    activation: Activation
    dropout: RowDropout | None
    overwrite_hidden: bool
    take_dx: TakeRows | None
    take_dw: TakeGrad | None
    adapters: Adapters


@torch.no_grad()
def wave_backward(
    x_RD: Tensor,
    dy_RD: Tensor,
    row_weight_R: Tensor,
    weights: Tensor | StackedWeights,
    shape: ExpertShape,
    ends: Tensor,
    counts: Sequence[int] | None = None,
    hidden: Tensor | None = None,
    need_dw: bool = True,
    activation: Activation | None = None,
    overwrite_hidden: bool = False,
    take_dx: TakeRows | None = None,
    take_dw: TakeGrad | None = None,
    dropout: RowDropout | None = None,
    adapters: Adapters = NO_ADAPTERS,
) -> WaveGrads:
    """Return the gradients of sum(row_weight * y * dy): `dy_RD` is the gradient of the *weighted*
    y.

    With `take_dx`, dx is computed before dw and passed on at once: it can travel meanwhile. With
    `take_dw`, each dw is passed on instead of being returned.
    `hidden` is recomputed if it is None; it may be changed with `overwrite_hidden`. y is never
    recomputed: the gradient of a routing weight, y·dy, equals a·(dy @ w_out) plus b_out·dy, and
    dy @ w_out is needed anyway. The routing weight multiplies the activation and its gradient, so
    no scaled copy of dy is needed.
    """
    own = _Parameters.of(weights, shape)
    activation = activation or Fused(shape.gated)
    wave = _Backward(
        x_RD, dy_RD, row_weight_R, own, shape, ends, counts, hidden, need_dw, activation,
        dropout, overwrite_hidden or hidden is None, take_dx, take_dw, adapters,
    )  # fmt: skip
    backend = grouped.backend_for(x_RD, own.w_in, shape, isinstance(weights, StackedWeights))
    return _backward_loop(wave) if backend == "loop" else _backward_grouped(wave, backend)


def _backward_grouped(wave: _Backward, backend: grouped.Backend) -> WaveGrads:
    x_RD, dy_RD, own, ends = wave.x_RD, wave.dy_RD, wave.own, wave.ends
    hidden = wave.hidden
    low_in, low_out = wave.adapters
    if hidden is None:
        hidden = _hidden_grouped(backend, x_RD, own, ends, low_in)
    da_RH = grouped.product(backend, dy_RD, own.w_out, ends)
    if low_out is not None:
        low_out.add_input_grad(da_RH, dy_RD, backend, ends)
    # A kept hidden may be needed by another backward through the graph: overwrite only our own.
    activation = with_dropout(wave.activation, wave.dropout)
    act = activation.backward(hidden, da_RH, wave.row_weight_R, wave.overwrite_hidden)
    del da_RH, hidden
    drow_weight_R = act.drow_weight_R
    if own.b_out is not None:
        drow_weight_R = drow_weight_R + (_of_rows(own.b_out, ends, dy_RD) * dy_RD).sum(-1)
    dx_RD = None
    if wave.take_dx is not None:
        dx_RD = _input_grad_grouped(backend, act.dh, own, ends, low_in)
        wave.take_dx(dx_RD)
    dw: tuple[Tensor, ...] = ()
    if wave.need_dw:
        pairs = [(act.dh, x_RD), (dy_RD, act.weighted_RH)]  # w_in, w_out: rows, then columns
        if wave.shape.transposed:
            pairs = [(columns, rows) for rows, columns in pairs]
        if wave.shape.bias:
            # a product with ones sums the token rows of each expert in a fixed order
            ones = x_RD.new_ones(x_RD.shape[0], 8)
            weighted = (dy_RD * wave.row_weight_R.unsqueeze(-1)).to(dy_RD.dtype)
            pairs += [(ones, act.dh), (ones, weighted)]
        if wave.take_dw is not None:
            for number, (a, b) in enumerate(pairs):
                wave.take_dw(number, Product(backend, a, b, ends, wave.counts))
            pairs = []
        dw = tuple(grouped.weight_grad(backend, a, b, ends, wave.counts) for a, b in pairs)
        if dw and wave.shape.bias:
            dw = (*dw[:2], *(total[:, 0] for total in dw[2:]))
    if dx_RD is None:
        dx_RD = _input_grad_grouped(backend, act.dh, own, ends, low_in)
    groups = backend, ends, wave.counts
    low_rank = (
        None if low_in is None else low_in.grads(x_RD, act.dh, *groups),
        None if low_out is None else low_out.grads(act.weighted_RH, dy_RD, *groups),
    )
    return WaveGrads(dx_RD, dw, drow_weight_R, low_rank)


def _input_grad_grouped(
    backend: grouped.Backend,
    dh_RH: Tensor,
    own: _Parameters,
    ends: Tensor,
    low_in: LowRank | None,
) -> Tensor:
    dx_RD = grouped.product(backend, dh_RH, own.w_in, ends)
    if low_in is not None:
        low_in.add_input_grad(dx_RD, dh_RH, backend, ends)
    return dx_RD


def _backward_loop(wave: _Backward) -> WaveGrads:
    x_RD, own, shape = wave.x_RD, wave.own, wave.shape
    dx_RD = torch.empty_like(x_RD)
    wide = torch.promote_types(x_RD.dtype, torch.float32)
    drow_weight_R = x_RD.new_empty(x_RD.shape[0], dtype=wide)
    n = own.w_in.shape[0]
    dw = tuple(x_RD.new_empty(n, *size) for size in shape.sizes) if wave.need_dw else ()
    low_rank: list[list[LowRankGrads]] = [[], []]
    for expert, rows in _expert_rows(wave.ends, wave.counts):
        low_in, low_out = wave.adapters.part(expert, expert + 1)
        x, dy, row_weight = x_RD[rows], wave.dy_RD[rows], wave.row_weight_R[rows]
        if wave.hidden is None:
            out = x.new_empty(len(x), shape.in_rows)
            h = _linear(x, own.w_in[expert], own.b_in, expert, out, low_in)
        else:
            h = wave.hidden[rows]
        da = torch.mm(dy, own.w_out[expert])
        if low_out is not None:
            low_out.add_input_grad(da, dy, "single", wave.ends)
        activation = with_dropout(wave.activation, wave.dropout, rows)
        act = activation.backward(h, da, row_weight, wave.overwrite_hidden)
        drow_weight_R[rows] = act.drow_weight_R
        if own.b_out is not None:
            drow_weight_R[rows] += (own.b_out[expert] * dy).sum(-1)
        if wave.need_dw:
            pairs = [(act.dh, x), (dy, act.weighted_RH)]
            for grad, (left, right) in zip(dw[:2], pairs, strict=True):
                left, right = (right, left) if shape.transposed else (left, right)
                torch.mm(left.t(), right, out=grad[expert])
            if shape.bias:
                dw[2][expert] = act.dh.sum(0)
                dw[3][expert] = (dy * row_weight.unsqueeze(-1)).sum(0)
        torch.mm(act.dh, own.w_in[expert], out=dx_RD[rows])
        if low_in is not None:
            low_in.add_input_grad(dx_RD[rows], act.dh, "single", wave.ends)
            low_rank[0].append(low_in.grads(x, act.dh, "single", wave.ends))
        if low_out is not None:
            low_rank[1].append(low_out.grads(act.weighted_RH, dy, "single", wave.ends))
    if wave.take_dx is not None:
        wave.take_dx(dx_RD)
    if wave.take_dw is not None:
        for number, grad in enumerate(dw):
            wave.take_dw(number, Computed(grad))
        dw = ()
    return WaveGrads(dx_RD, dw, drow_weight_R, (_stacked(low_rank[0]), _stacked(low_rank[1])))


def _stacked(grads: list[LowRankGrads]) -> LowRankGrads | None:
    return LowRankGrads(*map(torch.cat, zip(*grads, strict=True))) if grads else None


def _hidden_grouped(
    backend: grouped.Backend,
    x_RD: Tensor,
    own: _Parameters,
    ends: Tensor,
    low_in: LowRank | None,
) -> Tensor:
    hidden = grouped.product(backend, x_RD, own.w_in.transpose(1, 2), ends)
    if low_in is not None:
        low_in.add_product(hidden, x_RD, backend, ends)
    return _add_bias(hidden, own.b_in, ends)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: int,
    out: Tensor,
    low_rank: LowRank | None,
) -> Tensor:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias[expert], x, weight.t(), out=out)
    if low_rank is not None:
        low_rank.add_product(out, x, "single", x)
    return out


def _add_bias(rows: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    return rows if bias is None else rows.add_(_of_rows(bias, ends, rows))


def _of_rows(bias: Tensor, ends: Tensor, rows: Tensor) -> Tensor:
    """Return the bias of the expert of each token row."""
    row_R = torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype)
    return bias.index_select(0, torch.searchsorted(ends, row_R, right=True))


def _expert_rows(ends: Tensor, counts: Sequence[int] | None) -> list[tuple[int, slice]]:
    """Return experts with their token rows, including experts without any: their dw must be
    zero."""
    stops = ends.tolist() if counts is None else list(itertools.accumulate(counts))
    return [
        (expert, slice(start, stop))
        for expert, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True))
    ]
