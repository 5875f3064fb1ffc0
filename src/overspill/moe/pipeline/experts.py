"""Forward and backward of resident experts over the partitions of a batch.

Shapes: T tokens, D model, K top-k, N token rows that this rank computes, L experts of this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.compute.activation import Activation
from overspill.compute.experts import StackedWeights, wave_backward, wave_forward
from overspill.compute.permute import combine, sum_rows
from overspill.compute.weight_grad import WeightGrad
from overspill.core.experts import ExpertShape
from overspill.moe.compute_trace import ComputeTrace
from overspill.moe.pipeline.activations import HostCopies, Saved
from overspill.moe.pipeline.rows import DividedRows, take_rows
from overspill.moe.pipeline.schedule import run_pipeline
from overspill.plan.reuse import Strategy
from overspill.transfer.work_stream import Arrival


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of this rank for one pass."""

    weights: StackedWeights
    shape: ExpertShape
    activation: Activation | None


class Activations:
    """T_DI and T_M of all partitions, from forward to backward."""

    def __init__(self, strategy: Strategy, copies: HostCopies | None) -> None:
        self.dispatched = Saved("T_DI", strategy.dispatched, copies)
        self.middle = Saved("T_M", strategy.middle, copies)

    def settle(self, number: int) -> None:
        self.dispatched.settle(number)
        self.middle.settle(number)

    def prefetch(self, number: int) -> None:
        self.dispatched.prefetch(number)
        self.middle.prefetch(number)

    def abandon(self) -> None:
        self.dispatched.abandon()
        self.middle.abandon()


def forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    rows: DividedRows,
    experts: Experts,
    saved: Activations | None,
) -> Tensor:
    """Each token's weighted sum over its experts, [T, D]; fills `saved` for backward."""
    trace = ComputeTrace(rows.exchange.recorder, rows.exchange.device)
    y_TD = torch.empty_like(x_TD)

    def send(number: int, sent: list[Arrival]) -> None:
        sent.append(rows.send(x_TD, number, f"S{number}"))

    def compute(number: int, received: list[Tensor], returned: list[Arrival]) -> None:
        part = rows.partitions[number]
        trace.begin_wave(f"C{number}")
        x_ND = take_rows(received.pop(), part.to_experts)
        y_ND, hidden = wave_forward(
            x_ND, experts.weights, experts.shape, part.ends, part.counts, experts.activation
        )
        if saved is not None:
            saved.dispatched.save(x_ND)
            saved.middle.save(hidden)
        trace.end_wave()
        returned.append(rows.send_back(y_ND, number, f"R{number}"))

    def finish(number: int, returned: list[Tensor]) -> None:
        part = rows.partitions[number]
        out_TD = y_TD[part.tokens]
        combine(
            returned.pop(), weights_TK[part.tokens], part.order, out=out_TD, first=part.rows.start
        )
        if saved is not None:
            saved.settle(number)

    try:
        run_pipeline(len(rows.partitions), send, compute, finish)
    finally:
        if saved is not None:
            saved.abandon()
    return y_TD


@dataclass(frozen=True)
class Grads:
    dx_TD: Tensor
    dweights_TK: Tensor
    dw: tuple[Tensor, ...]
    """The gradients of w_in and w_out, [L, …], for the mean of the ranks' losses; empty if not
    needed."""


def backward(
    x_TD: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    rows: DividedRows,
    experts: Experts,
    saved: Activations,
    need_dw: bool,
) -> Grads:
    """The gradients of tokens, routing weights and, if needed, of the experts' weights."""
    row_weights = rows.send_weights(weights_TK)
    dy_TD = dy_TD.contiguous()
    trace = ComputeTrace(rows.exchange.recorder, rows.exchange.device)
    dx_TD = torch.empty_like(x_TD)
    drow_weights: list[Tensor] = []
    dw: dict[int, Tensor] = {}  # 0: of w_in, 1: of w_out
    n = len(rows.partitions)

    def send(number: int, sent: list[Arrival]) -> None:
        sent.append(rows.send(dy_TD, number, f"S{number}"))
        if saved.dispatched.tensors[number] is None:
            sent.append(rows.send(x_TD, number, f"S of x {number}"))

    def add(position: int, grad: WeightGrad) -> None:
        """Add the gradient of a wave; sums over several partitions are float32 (or wider)."""
        if position in dw:
            grad.add_to(dw[position])
        else:
            dw[position] = grad.value() if n == 1 else grad.widened()

    def compute(number: int, received: list[Tensor], returned: list[Arrival]) -> None:
        part = rows.partitions[number]
        saved.prefetch(number + 1)  # is copied while this partition computes
        trace.begin_wave(f"C{number}")
        x_ND = saved.dispatched.take(number)
        if x_ND is None:
            x_ND = take_rows(received.pop(), part.to_experts)
        hidden = saved.middle.take(number)
        # if no partition has token rows, the gradients are the zeros of the last one
        has_dw = part.n_computed > 0 or (not dw and number == n - 1)
        grads = wave_backward(
            x_ND,
            take_rows(received.pop(), part.to_experts),
            row_weights[number],
            experts.weights,
            experts.shape,
            part.ends,
            part.counts,
            hidden,
            need_dw and has_dw,
            experts.activation,
            overwrite_hidden=hidden is not saved.middle.tensors[number],
            # R begins before the gradients of weights are computed
            take_dx=lambda dx_ND: returned.append(rows.send_back(dx_ND, number, f"R{number}")),
            take_dw=add,
        )
        drow_weights.append(grads.drow_weight_R)
        trace.end_wave()

    def finish(number: int, returned: list[Tensor]) -> None:
        part = rows.partitions[number]
        sum_rows(returned.pop(), part.order, out=dx_TD[part.tokens], first=part.rows.start)

    try:
        saved.prefetch(0)
        run_pipeline(n, send, compute, finish)
    finally:
        saved.abandon()
    dweights_TK = rows.return_weight_grads(drow_weights)
    means = []
    for position in sorted(dw):
        grad = dw.pop(position)  # one by one: their sums are released
        means.append((grad / rows.exchange.size if rows.exchange.size > 1 else grad).to(x_TD.dtype))
    return Grads(dx_TD, dweights_TK, tuple(means))
