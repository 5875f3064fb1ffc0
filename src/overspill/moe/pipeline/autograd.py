"""Pipelined experts as one autograd operation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overspill.compute.activation import Activation
from overspill.compute.experts import StackedWeights
from overspill.core.experts import ExpertShape
from overspill.moe.pipeline.activations import HostCopies
from overspill.moe.pipeline.experts import Activations, Experts, backward, forward
from overspill.moe.pipeline.rows import DividedRows
from overspill.moe.pipeline.tuner import PassTimer
from overspill.plan.reuse import Strategy


@dataclass(frozen=True, eq=False)
class PassPlan:
    """The plan of one pass through a layer."""

    rows: DividedRows
    shape: ExpertShape
    activation: Activation | None
    strategy: Strategy
    copies: HostCopies | None
    timer: PassTimer | None

    def experts(self, w_in: Tensor, w_out: Tensor) -> Experts:
        return Experts(StackedWeights(w_in, w_out), self.shape, self.activation)


def pipelined_experts(
    x_TD: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, plan: PassPlan
) -> Tensor:
    """Each token's weighted sum over its experts, [T, D]."""
    inputs = x_TD, weights_TK, w_in, w_out
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        y_TD: Tensor = _Pipelined.apply(*inputs, plan)  # type: ignore[no-untyped-call]
        return y_TD
    with torch.no_grad():
        return forward(x_TD, weights_TK, plan.rows, plan.experts(w_in, w_out), None)


class _Pipelined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, plan: PassPlan
    ) -> Tensor:
        saved = Activations(plan.strategy, plan.copies)
        if plan.timer is not None:
            plan.timer.begin_forward()
        y_TD = forward(x_TD, weights_TK, plan.rows, plan.experts(w_in, w_out), saved)
        if plan.timer is not None:
            plan.timer.end_forward()
        ctx.plan = plan
        # all through autograd, so that a checkpoint drops them like any activation
        activations = *saved.dispatched.tensors, *saved.middle.tensors
        ctx.save_for_backward(x_TD, weights_TK, w_in, w_out, *activations)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        plan: PassPlan = ctx.plan
        x_TD, weights_TK, w_in, w_out, *activations = ctx.saved_tensors
        saved = Activations(plan.strategy, plan.copies)
        n = len(plan.rows.partitions)
        saved.dispatched.tensors, saved.middle.tensors = activations[:n], activations[n:]
        need_in, need_out = ctx.needs_input_grad[2:4]
        if plan.timer is not None:
            plan.timer.begin_backward()
        experts = plan.experts(w_in, w_out)
        need_dw = need_in or need_out
        grads = backward(x_TD, weights_TK, dy_TD, plan.rows, experts, saved, need_dw)
        if plan.timer is not None:
            plan.timer.end_backward()
        dw_in, dw_out = grads.dw or (None, None)
        return (
            grads.dx_TD,
            grads.dweights_TK.to(weights_TK.dtype),
            dw_in if need_in else None,
            dw_out if need_out else None,
            None,
        )
