"""The experts of one layer as an autograd operation.

Two functions in a row. `_Entrance` saves the input and does the whole backward; `_Experts` computes
the output and saves nothing (unless activations are kept). A recomputation under
torch.utils.checkpoint stops at the last saved tensor, which is the entrance's: the experts' forward
does not run a second time.

Shapes: T tokens, D model, K top-k, R token rows sorted by expert.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overspill.compute.experts import WaveGrads, wave_backward, wave_forward
from overspill.core.errors import OrderError
from overspill.core.experts import Phase
from overspill.moe.autograd_state import graph_task, in_function
from overspill.moe.data_parallel import check_processes
from overspill.moe.decoding import current_decoder
from overspill.moe.engine import Engine
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.placeholder import ExpertPlaceholder, check_placeholder
from overspill.plan.waves import row_pieces


def routed_experts(
    placeholder: ExpertPlaceholder, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Each token's weighted sum over its experts, [T, D]. Where the layer drops assignments (its
    placeholder says so), an id of `n_experts` means "no expert"."""
    check_placeholder(placeholder)
    layer_pass = LayerPass(
        placeholder.layer,
        trained=placeholder.requires_grad,
        drops=placeholder.drops,
        activation=placeholder.activation,
    )
    if not _recomputing():
        expert_ids_TK = placeholder.reroute(expert_ids_TK)
    placeholder.top_k = expert_ids_TK.shape[1]
    if (decoder := current_decoder()) is not None:
        return decoder.experts(placeholder, x_TD, expert_ids_TK, weights_TK)
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
        # set here: inside a Function's forward, torch says that gradients are off
        layer_pass.training = True
        if layer_pass.trained:
            check_processes()
        ticket = _Entrance.apply(x_TD, weights_TK, placeholder, engine, layer_pass)  # type: ignore[no-untyped-call]
        args = (x_TD.detach(), weights_TK.detach(), expert_ids_TK, engine, layer_pass)
        y: Tensor = _Experts.apply(ticket, *args)  # type: ignore[no-untyped-call]
        return y
    with engine.exclusive():
        if layer_pass.trained and engine.can_train and in_function():
            engine.training.expect_recomputation(layer_pass.layer)
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
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_TD, weights_TK = ctx.saved_tensors
        # autograd.grad() and backward(inputs=...) leave out parameters that they do not name
        (_, _, (placeholder, _)) = ctx.next_functions
        wanted = placeholder is not None and _is_wanted(placeholder)
        args = x_TD, weights_TK, dy_TD, ctx.engine, ctx.layer_pass
        with ctx.engine.exclusive():
            dx_TD, dweights_TK = _backward(*args, trained=ctx.layer_pass.trained and wanted)
        return dx_TD, dweights_TK, None, None, None


def _is_wanted(placeholder: Any) -> bool:
    """Whether the running backward accumulates into the leaf node of a placeholder. As in torch,
    experts that were frozen after their forward get no gradient."""
    try:
        executed = bool(torch._C._will_engine_execute_node(placeholder))
        return executed and placeholder.variable.requires_grad
    except RuntimeError as error:  # torch cannot tell for a leaf that autograd.grad() names
        raise OrderError(
            "autograd.grad() cannot return gradients of offloaded experts; leave their "
            "placeholders out of its inputs, or call backward()"
        ) from error


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
        with engine.exclusive():
            if layer_pass.trained and engine.can_train:
                engine.training.open_pass(layer_pass, recomputed=_recomputing())
            keep = engine.settings.activations == "keep"
            y_TD = _forward(x_TD, weights_TK, expert_ids_TK, engine, layer_pass, keep)
        if layer_pass.kept is not None:
            # through autograd, so that a checkpoint drops it like any activation
            ctx.save_for_backward(layer_pass.kept)
            layer_pass.kept = None
        ctx.layer_pass = layer_pass
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        saved = ctx.saved_tensors  # once: under a checkpoint it can be read only once
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
    if engine.can_train:
        engine.training.check_forward(layer_pass.layer)
    # in a recomputation the layers that come next are those below
    phase = Phase.BACKWARD if _recomputing() else Phase.FORWARD
    if phase is Phase.FORWARD:
        engine.begin_pass(layer_pass, len(x_TD))
    exchange = engine.row_exchange
    if exchange is None:
        return _compute(x_TD, weights_TK, expert_ids_TK, engine, layer_pass, phase, keep)
    rows = layer_pass.sent = engine.route_rows(layer_pass.layer, expert_ids_TK)
    x_ND = exchange.send(rows, x_TD)
    y_ND = _compute(x_ND, None, rows.expert_ids_N1, engine, layer_pass, phase, keep)
    return exchange.combine(rows, y_ND, weights_TK)


def _compute(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    expert_ids_TK: Tensor,
    engine: Engine,
    layer_pass: LayerPass,
    phase: Phase,
    keep: bool,
) -> Tensor:
    """The forward of local experts. With several ranks the tokens are rows of all of them, each for
    one expert and without a weight."""
    compute = engine.compute
    compute.enter_forward(layer_pass, expert_ids_TK, phase, keep)
    dispatcher, on_cpu = compute.dispatcher, compute.cpu_forward(layer_pass, x_TD)
    n_rows = layer_pass.rows.n_rows
    y_RD = x_TD.new_empty(n_rows, x_TD.shape[1])
    if keep:
        layer_pass.kept = x_TD.new_empty(n_rows, engine.shape.in_rows)
    for wave in compute.waves(layer_pass, phase):
        for start, end, ends, counts in _pieces(wave, compute.max_rows):
            x_rows = dispatcher.dispatch(layer_pass.rows, x_TD, start, end)
            args = (x_rows, wave.weights, engine.shape, ends, counts, layer_pass.activation)
            y_rows, hidden = wave_forward(*args)
            y_RD = _with_rows(y_RD, start, y_rows)
            if layer_pass.kept is not None:
                layer_pass.kept = _with_rows(layer_pass.kept, start, hidden)
            del args, x_rows, y_rows, hidden
    if on_cpu is not None:
        on_cpu.take(y_RD)
    return dispatcher.combine(layer_pass.rows, y_RD, weights_TK)


def _with_rows(all_rows: Tensor, start: int, rows: Tensor) -> Tensor:
    """Copies the results of a wave to their place; the results themselves if they are all."""
    if len(rows) == len(all_rows):
        return rows
    all_rows[start : start + len(rows)] = rows
    return all_rows


def _recomputing() -> bool:
    """Whether this forward runs inside a backward, for a checkpoint."""
    return graph_task() != -1


@torch.no_grad()
def _backward(
    x_TD: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    engine: Engine,
    layer_pass: LayerPass,
    trained: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the input and of the routing weights; if `trained`, those of the experts are
    delivered to the training step."""
    need_dw = trained and engine.training.begin_backward(layer_pass)
    if layer_pass.trained and not trained and engine.can_train:
        engine.training.check_backward(layer_pass)
    exchange, rows = engine.row_exchange, layer_pass.sent
    if exchange is None or rows is None:
        return _compute_grads(x_TD, weights_TK, dy_TD, engine, layer_pass, need_dw)
    x_ND, dy_ND = exchange.send(rows, x_TD), exchange.send(rows, dy_TD)
    weights_N1 = exchange.send_weights(rows, weights_TK)
    grads = _compute_grads(x_ND, weights_N1, dy_ND, engine, layer_pass, need_dw)
    return exchange.combine_grads(rows, *grads)


def _compute_grads(
    x_TD: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    engine: Engine,
    layer_pass: LayerPass,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    """The backward of local experts."""
    compute, dispatcher = engine.compute, engine.compute.dispatcher  # experts may have moved
    compute.enter_backward(layer_pass)
    rows = layer_pass.rows
    dy_TD = dy_TD.contiguous()
    dx_RD = x_TD.new_empty(rows.n_rows, x_TD.shape[1])
    drow_weight_R = weights_TK.new_empty(rows.n_rows)
    on_cpu = compute.cpu_backward(layer_pass, x_TD, dy_TD, weights_TK)
    for wave in compute.waves(layer_pass, Phase.BACKWARD):
        total = grads = None
        for start, end, ends, counts in _pieces(wave, compute.max_rows):
            grads = wave_backward(
                dispatcher.dispatch(rows, x_TD, start, end),
                dispatcher.dispatch(rows, dy_TD, start, end),
                dispatcher.row_weights(rows, weights_TK, start, end),
                wave.weights,
                engine.shape,
                ends,
                counts,
                hidden=None if layer_pass.kept is None else layer_pass.kept[start:end],
                need_dw=need_dw,
                activation=layer_pass.activation,
            )
            dx_RD = _with_rows(dx_RD, start, grads.dx_RD)
            drow_weight_R[start:end] = grads.drow_weight_R
            total = grads if total is None else _add(total, grads)
        if need_dw and total is not None:
            engine.training.deliver(layer_pass, wave, total.dw)
        del total, grads  # before the next wave computes, not after
    layer_pass.kept = None
    if on_cpu is not None:
        on_cpu.take(dx_RD, drow_weight_R)
    if need_dw:
        engine.training.end_backward(layer_pass)
    return dispatcher.combine_grads(rows, dx_RD, drow_weight_R)


def _pieces(wave: Wave, limit: int) -> list[tuple[int, int, Tensor, list[int] | None]]:
    """(first row, end, cumulative ends, counts) of a wave, whole or, where one expert alone has
    more token rows than the workspace holds, in pieces."""
    if wave.end - wave.start <= limit or wave.stop - wave.first > 1:
        return [(wave.start, wave.end, wave.ends, wave.counts)]
    pieces = row_pieces(wave.start, wave.end, limit)
    return [(a, b, torch.full_like(wave.ends, b - a), [b - a]) for a, b in pieces]


def _add(total: WaveGrads, grads: WaveGrads) -> WaveGrads:
    """Adds the weight gradients of two pieces of one expert's rows, in float32 between pieces."""
    dw = tuple(a.float().add_(b) for a, b in zip(total.dw, grads.dw, strict=True))
    return WaveGrads(grads.dx_RD, dw, grads.drow_weight_R)
