"""Forward and backward of resident experts over the partitions of a batch.

Shapes: T tokens, D model, K top-k, N token rows that this rank computes, L experts of this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.compute.activation import Activation
from overspill.compute.experts import StackedWeights, wave_backward, wave_forward
from overspill.compute.permute import combine, gather_rows, sum_rows
from overspill.compute.weight_grad import WeightGrad
from overspill.core.experts import ExpertShape
from overspill.moe.compute_trace import ComputeTrace
from overspill.moe.pipeline.activations import HostCopies, Saved
from overspill.moe.pipeline.rows import Partition, RoutedRows
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


def _taken(rows: list[Tensor], index: Tensor | None) -> Tensor:
    """The last of `rows`, in another order."""
    return rows.pop() if index is None else rows.pop().index_select(0, index)


class _Pass:
    """What forward and backward have in common."""

    def __init__(self, rows: RoutedRows, experts: Experts) -> None:
        self._rows = rows
        self._experts = experts
        self._exchange = rows.exchange
        self._trace = ComputeTrace(rows.exchange.recorder, rows.exchange.device)

    def _dispatch(self, x_TD: Tensor, number: int, what: str) -> Arrival:
        part = self._rows.partitions[number]
        rows = gather_rows(x_TD, self._rows.order, part.rows.start, part.rows.stop)
        return self._exchange.send(rows, part.sent, part.received, f"{what}{number}")

    def _return(self, rows_ND: Tensor, part: Partition, label: str) -> Arrival:
        rows_ND = _taken([rows_ND], part.to_ranks)
        return self._exchange.send(rows_ND, part.received, part.sent, label)


class _Forward(_Pass):
    def __init__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        rows: RoutedRows,
        experts: Experts,
        saved: Activations | None,
    ) -> None:
        super().__init__(rows, experts)
        self._x_TD, self._weights_TK, self._saved = x_TD, weights_TK, saved
        self.y_TD = torch.empty_like(x_TD)

    def send(self, number: int, sent: list[Arrival]) -> None:
        sent.append(self._dispatch(self._x_TD, number, "S"))

    def compute(self, number: int, rows: list[Tensor], returned: list[Arrival]) -> None:
        part, own = self._rows.partitions[number], self._experts
        self._trace.begin_wave(f"C{number}")
        x_ND = _taken(rows, part.to_experts)
        y_ND, hidden = wave_forward(
            x_ND, own.weights, own.shape, part.ends, part.counts, own.activation
        )
        if self._saved is not None:
            self._saved.dispatched.save(x_ND)
            self._saved.middle.save(hidden)
        self._trace.end_wave()
        returned.append(self._return(y_ND, part, f"R{number}"))

    def finish(self, number: int, rows: list[Tensor]) -> None:
        part = self._rows.partitions[number]
        weights_TK, y_TD = self._weights_TK[part.tokens], self.y_TD[part.tokens]
        combine(rows.pop(), weights_TK, part.order, out=y_TD, first=part.rows.start)
        if self._saved is not None:
            self._saved.settle(number)


class _Backward(_Pass):
    def __init__(
        self,
        x_TD: Tensor,
        dy_TD: Tensor,
        row_weights: list[Tensor],
        rows: RoutedRows,
        experts: Experts,
        saved: Activations,
        need_dw: bool,
    ) -> None:
        super().__init__(rows, experts)
        self._x_TD, self._dy_TD, self._row_weights = x_TD, dy_TD, row_weights
        self._saved, self._need_dw = saved, need_dw
        self.dx_TD = torch.empty_like(x_TD)
        self.drow_weights: list[Tensor] = []
        self.dw: dict[int, Tensor] = {}  # 0: of w_in, 1: of w_out
        saved.prefetch(0)

    def send(self, number: int, sent: list[Arrival]) -> None:
        sent.append(self._dispatch(self._dy_TD, number, "S"))
        if self._saved.dispatched.tensors[number] is None:
            sent.append(self._dispatch(self._x_TD, number, "S of x "))

    def compute(self, number: int, rows: list[Tensor], returned: list[Arrival]) -> None:
        part, own, saved = self._rows.partitions[number], self._experts, self._saved
        saved.prefetch(number + 1)  # is copied while this partition computes
        self._trace.begin_wave(f"C{number}")
        x_ND = saved.dispatched.take(number)
        if x_ND is None:
            x_ND = _taken(rows, part.to_experts)
        hidden = saved.middle.take(number)
        need_dw = self._need_dw and (part.n_computed > 0 or self._is_last_without_dw(number))
        grads = wave_backward(
            x_ND,
            _taken(rows, part.to_experts),
            self._row_weights[number],
            own.weights,
            own.shape,
            part.ends,
            part.counts,
            hidden,
            need_dw,
            own.activation,
            overwrite_hidden=hidden is not saved.middle.tensors[number],
            # R begins before the gradients of weights are computed
            take_dx=lambda dx_ND: returned.append(self._return(dx_ND, part, f"R{number}")),
            take_dw=self._add,
        )
        self.drow_weights.append(grads.drow_weight_R)
        self._trace.end_wave()

    def finish(self, number: int, rows: list[Tensor]) -> None:
        part = self._rows.partitions[number]
        dx_TD = self.dx_TD[part.tokens]
        sum_rows(rows.pop(), part.order, out=dx_TD, first=part.rows.start)

    def _is_last_without_dw(self, number: int) -> bool:
        """Whether no partition has token rows: the gradients are then the zeros of this one."""
        return not self.dw and number == len(self._rows.partitions) - 1

    def _add(self, position: int, grad: WeightGrad) -> None:
        """Sums over several partitions are float32 (or wider)."""
        if position in self.dw:
            grad.add_to(self.dw[position])
        elif len(self._rows.partitions) == 1:
            self.dw[position] = grad.value()
        else:
            self.dw[position] = grad.widened()


def forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    rows: RoutedRows,
    experts: Experts,
    saved: Activations | None,
) -> Tensor:
    """Each token's weighted sum over its experts, [T, D]; fills `saved` for backward."""
    steps = _Forward(x_TD, weights_TK, rows, experts, saved)
    try:
        run_pipeline(len(rows.partitions), steps)
    finally:
        if saved is not None:
            saved.abandon()
    return steps.y_TD


@dataclass(frozen=True)
class Grads:
    dx_TD: Tensor
    dweights_TK: Tensor
    dw: tuple[Tensor, ...]
    """Of w_in and w_out, [L, …], for the mean of the ranks' losses; empty if not needed."""


def backward(
    x_TD: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    rows: RoutedRows,
    experts: Experts,
    saved: Activations,
    need_dw: bool,
) -> Grads:
    row_weights = rows.send_weights(weights_TK)
    dy_TD = dy_TD.contiguous()
    try:
        steps = _Backward(x_TD, dy_TD, row_weights, rows, experts, saved, need_dw)
        run_pipeline(len(rows.partitions), steps)
    finally:
        saved.abandon()
    dweights_TK = rows.return_weight_grads(steps.drow_weights)
    dw = []
    for position in sorted(steps.dw):
        grad = steps.dw.pop(position)  # one by one: their sums are released
        dw.append((grad / rows.exchange.size if rows.exchange.size > 1 else grad).to(x_TD.dtype))
    return Grads(steps.dx_TD, dweights_TK, tuple(dw))
