"""The experts of one layer as an autograd operation.

Two functions in a row. `_Entrance` saves the input and does the whole backward; `_Experts` computes
the output and saves nothing (unless activations are kept). A recomputation under
torch.utils.checkpoint stops at the last tensor saved, which is the entrance's: the experts' forward
does not run a second time.

Shapes: T tokens, D model, K top-k, R = T*K rows sorted by expert.
"""

from typing import Any

import torch
from torch import Tensor

from overspill.compute.experts import WaveGrads, wave_backward, wave_forward
from overspill.compute.permute import (
    combine,
    gather_rows,
    row_weights,
    sum_rows,
    weights_grad,
)
from overspill.core.experts import Phase
from overspill.moe.engine import Engine
from overspill.moe.passes import LayerPass, Wave
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.plan.waves import row_pieces


def routed_experts(
    placeholder: ExpertPlaceholder, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Each token's weighted sum over its experts, [T, D]. Where the layer drops assignments (its
    placeholder says so), an id of `n_experts` stands for no expert."""
    layer_pass = LayerPass(
        placeholder.layer,
        trained=placeholder.requires_grad,
        drops=placeholder.drops,
        activation=placeholder.activation,
        simulated=placeholder.source is not None,
    )
    if not _recomputing():
        expert_ids_TK = placeholder.reroute(expert_ids_TK)
    with torch.autocast(x_TD.device.type, enabled=False):  # experts compute in their own dtype
        return _routed(placeholder, x_TD, expert_ids_TK, weights_TK, layer_pass)


def _routed(
    placeholder: ExpertPlaceholder,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    layer_pass: LayerPass,
) -> Tensor:
    engine = placeholder.engine
    weights_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
    # the placeholder is an input too: experts learn even where nothing below them does
    trained = any(tensor.requires_grad for tensor in (x_TD, weights_TK, placeholder))
    if torch.is_grad_enabled() and trained:
        # told here: inside a Function's forward, torch says that gradients are off
        layer_pass.training = True
        ticket = _Entrance.apply(x_TD, weights_TK, placeholder, engine, layer_pass)  # type: ignore[no-untyped-call]
        args = (x_TD.detach(), weights_TK.detach(), expert_ids_TK, engine, layer_pass)
        y: Tensor = _Experts.apply(ticket, *args)  # type: ignore[no-untyped-call]
        return y
    return _forward(x_TD, weights_TK, expert_ids_TK, engine, layer_pass, keep=False)


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        placeholder: Tensor,
        engine: Engine,
        layer_pass: LayerPass,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weights_TK)
        ctx.engine, ctx.layer_pass = engine, layer_pass
        # has the output's shape, so that the output's gradient can come back through it, but no
        # memory of its own
        return x_TD.new_zeros(()).expand(x_TD.shape)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_TD, weights_TK = ctx.saved_tensors
        dx_TD, dweights_TK = _backward(x_TD, weights_TK, dy_TD, ctx.engine, ctx.layer_pass)
        return dx_TD, dweights_TK, None, None, None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ticket: Tensor,
        x_TD: Tensor,
        weights_TK: Tensor,
        expert_ids_TK: Tensor,
        engine: Engine,
        layer_pass: LayerPass,
    ) -> Tensor:
        engine.open_pass(layer_pass)
        keep = engine.settings.activations == "keep"
        y_TD = _forward(x_TD, weights_TK, expert_ids_TK, engine, layer_pass, keep)
        if layer_pass.kept is not None:
            # through autograd, so that a checkpoint drops it like any activation
            ctx.save_for_backward(layer_pass.kept)
            layer_pass.kept = None
        ctx.layer_pass = layer_pass
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        saved = ctx.saved_tensors  # once: under a checkpoint it may not be asked for again
        if saved:
            (ctx.layer_pass.kept,) = saved
        return dy_TD, None, None, None, None, None


def _forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    engine: Engine,
    layer_pass: LayerPass,
    keep: bool,
) -> Tensor:
    # in a recomputation the layers that come next are those below
    phase = Phase.BACKWARD if _recomputing() else Phase.FORWARD
    engine.route(layer_pass, x_TD, expert_ids_TK, phase)
    permutation = layer_pass.permutation
    assert permutation is not None
    on_host = engine.host_forward(layer_pass, x_TD)
    y_RD = x_TD.new_empty(permutation.n_rows, x_TD.shape[1])
    if keep:
        layer_pass.kept = x_TD.new_empty(permutation.n_rows, engine.shape.in_rows)
    for wave in engine.waves(layer_pass, phase):
        for start, end, ends, counts in _pieces(wave, engine):
            x_rows = gather_rows(x_TD, permutation, start, end)
            args = (x_rows, wave.weights, engine.shape, ends, counts, layer_pass.activation)
            y_rows, hidden = wave_forward(*args)
            y_RD[start:end] = y_rows
            if layer_pass.kept is not None:
                layer_pass.kept[start:end] = hidden
            del args, x_rows, y_rows, hidden
    if on_host is not None:
        on_host.take(y_RD)
    y_RD[layer_pass.n_routed(permutation.n_rows) :] = 0
    return combine(y_RD, weights_TK, permutation)


def _recomputing() -> bool:
    """Whether this forward runs inside a backward, for a checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)


@torch.no_grad()
def _backward(
    x_TD: Tensor, weights_TK: Tensor, dy_TD: Tensor, engine: Engine, layer_pass: LayerPass
) -> tuple[Tensor, Tensor]:
    need_dw = engine.begin_backward(layer_pass)
    engine.reroute(layer_pass)
    permutation = layer_pass.permutation
    assert permutation is not None
    dy_TD = dy_TD.contiguous()
    dx_RD = x_TD.new_empty(permutation.n_rows, x_TD.shape[1])
    drow_weight_R = weights_TK.new_empty(permutation.n_rows)
    on_host = engine.host_backward(layer_pass, x_TD, dy_TD, weights_TK, need_dw)
    for wave in engine.waves(layer_pass, Phase.BACKWARD):
        total = grads = None
        for start, end, ends, counts in _pieces(wave, engine):
            grads = wave_backward(
                gather_rows(x_TD, permutation, start, end),
                gather_rows(dy_TD, permutation, start, end),
                row_weights(weights_TK, permutation, start, end),
                wave.weights,
                engine.shape,
                ends,
                counts,
                hidden=None if layer_pass.kept is None else layer_pass.kept[start:end],
                need_dw=need_dw,
                activation=layer_pass.activation,
            )
            dx_RD[start:end] = grads.dx_RD
            drow_weight_R[start:end] = grads.drow_weight_R
            total = grads if total is None else _add(total, grads)
        if need_dw and total is not None:
            engine.deliver(layer_pass, wave, total.dw)
        del total, grads  # before the next wave computes, not after
    layer_pass.kept = None
    if on_host is not None:
        on_host.take(dx_RD, drow_weight_R)
    engine.end_backward(layer_pass)
    routed = layer_pass.n_routed(permutation.n_rows)
    dx_RD[routed:] = 0
    drow_weight_R[routed:] = 0
    return sum_rows(dx_RD, permutation), weights_grad(drow_weight_R, permutation)


def _pieces(wave: Wave, engine: Engine) -> list[tuple[int, int, Tensor, list[int] | None]]:
    """(first row, end, cumulative ends, counts) of a wave, whole or, where one expert alone has too
    many rows for the workspace, in pieces."""
    limit = engine.placement.max_rows
    if wave.end - wave.start <= limit or wave.stop - wave.first > 1:
        return [(wave.start, wave.end, wave.ends, wave.counts)]
    pieces = row_pieces(wave.start, wave.end, limit)
    return [(a, b, torch.full_like(wave.ends, b - a), [b - a]) for a, b in pieces]


def _add(total: WaveGrads, grads: WaveGrads) -> WaveGrads:
    """Adds the weight gradients of two pieces of one expert's rows, in float32 between pieces."""
    dw = tuple(a.float().add_(b) for a, b in zip(total.dw, grads.dw, strict=True))
    return WaveGrads(grads.dx_RD, dw, grads.drow_weight_R)
