"""The experts of one layer as an autograd operation.

Two functions in a row. `_SavedInput` saves the input and does the whole backward; `_Experts`
computes the output and saves nothing (unless activations are kept). A recomputation under
torch.utils.checkpoint stops at the last saved tensor, which is the input: the experts' forward does
not run a second time.

Shapes: T tokens, D model, K top-k, R token rows sorted by expert.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overspill.compute.dropout import Dropout
from overspill.core.errors import ConfigError, OrderError
from overspill.core.experts import Phase
from overspill.moe.adapters import LayerAdapters
from overspill.moe.autograd_state import graph_task, in_function
from overspill.moe.data_parallel import check_processes
from overspill.moe.decoding import current_decoder
from overspill.moe.engine import Engine
from overspill.moe.exchanged_pass import exchanged_backward, exchanged_forward
from overspill.moe.expert_pass import BackwardPass, ForwardPass
from overspill.moe.layer_pass import LayerPass
from overspill.moe.placeholder import ExpertPlaceholder, check_placeholder


def routed_experts(
    placeholder: ExpertPlaceholder,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    dropout: Dropout | None = None,
) -> Tensor:
    """Each token's weighted sum over its experts, [T, D]. Where the layer drops assignments (its
    placeholder says so), an id of `n_experts` means "no expert"."""
    check_placeholder(placeholder)
    layer_pass = LayerPass(
        placeholder.layer,
        trained=placeholder.requires_grad,
        drops=placeholder.drops,
        activation=placeholder.activation,
        dropout=dropout,
    )
    decoder = current_decoder()
    if decoder is None and not _recomputing():  # a decoding step has its experts
        expert_ids_TK = placeholder.reroute(expert_ids_TK)
    placeholder.top_k = expert_ids_TK.shape[1]
    adapters = placeholder.adapters
    if decoder is not None:
        if adapters is not None:
            raise ConfigError(
                "decoding does not support peft adapters of experts beside their weights; save the "
                "adapter, and give its folder: overspill.LLM(path, adapter=folder)"
            )
        return decoder.experts(placeholder, x_TD, expert_ids_TK, weights_TK)
    with torch.autocast(x_TD.device.type, enabled=False):  # experts compute in their own dtype
        return _routed(placeholder, x_TD, expert_ids_TK, weights_TK, layer_pass, adapters)


def _routed(
    placeholder: ExpertPlaceholder,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    layer_pass: LayerPass,
    adapters: LayerAdapters | None,
) -> Tensor:
    engine = placeholder.engine
    factors = [] if adapters is None else adapters.tensors
    if adapters is not None:
        layer_pass.adapters = adapters.detached()
    weights_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
    # the placeholder and adapters are inputs too: they learn even where nothing below them does
    inputs = (x_TD, weights_TK, placeholder, *factors)
    trained = any(tensor is not None and tensor.requires_grad for tensor in inputs)
    if torch.is_grad_enabled() and trained:
        # set here: inside a Function's forward, torch says that gradients are off
        layer_pass.training = True
        if layer_pass.trained:
            check_processes()
            if engine.can_train:
                engine.training.optimizer.check_planned()
        shape = _SavedInput.apply(  # type: ignore[no-untyped-call]
            x_TD, weights_TK, placeholder, engine, layer_pass, adapters, *factors
        )
        args = (x_TD.detach(), weights_TK.detach(), expert_ids_TK, engine, layer_pass)
        y: Tensor = _Experts.apply(shape, *args)  # type: ignore[no-untyped-call]
        return y
    with engine.exclusive():
        if layer_pass.trained and engine.can_train and in_function():
            engine.training.passes.expect_recomputation(layer_pass.layer)
        return _forward(x_TD, weights_TK, expert_ids_TK, engine, layer_pass, keep=False)


class _SavedInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        placeholder: Tensor,
        engine: Engine,
        layer_pass: LayerPass,
        adapters: LayerAdapters | None,
        *factors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weights_TK, *factors)
        ctx.engine, ctx.layer_pass = engine, layer_pass
        ctx.scales = None if adapters is None else adapters.scales
        # has the output's shape, so that the output's gradient can come back through it, but no
        # memory of its own
        return x_TD.new_zeros(()).expand(x_TD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, *factors = ctx.saved_tensors
        # autograd.grad() and backward(inputs=...) leave out parameters that they do not name
        (_, _, (placeholder, _), *_) = ctx.next_functions
        wanted = placeholder is not None and _is_wanted(placeholder)
        layer_pass: LayerPass = ctx.layer_pass
        args = x_TD, weights_TK, dy_TD, ctx.engine, layer_pass
        adapters = None if ctx.scales is None else LayerAdapters.of(factors, ctx.scales)
        layer_pass.adapters = adapters
        with ctx.engine.exclusive():
            dx_TD, dweights_TK = _backward(*args, trained=layer_pass.trained and wanted)
        layer_pass.adapters = None
        grads = [] if adapters is None else adapters.grads()
        return dx_TD, dweights_TK, None, None, None, None, *grads


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
        shape: Tensor,
        x_TD: Tensor,
        weights_TK: Tensor,
        expert_ids_TK: Tensor,
        engine: Engine,
        layer_pass: LayerPass,
    ) -> Tensor:
        with engine.exclusive():
            if layer_pass.trained and engine.can_train:
                engine.training.passes.open(layer_pass, recomputed=_recomputing())
            keep = engine.settings.activations == "keep"
            y_TD = _forward(x_TD, weights_TK, expert_ids_TK, engine, layer_pass, keep)
        layer_pass.adapters = None  # copies, which backward makes again
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
        engine.training.states.check_forward(layer_pass.layer)
    # in a recomputation the layers that come next are those below
    phase = Phase.BACKWARD if _recomputing() else Phase.FORWARD
    if phase is Phase.FORWARD:
        engine.begin_pass(layer_pass, len(x_TD))
        engine.popularity.observe(layer_pass.layer, x_TD, expert_ids_TK)
    if engine.rank_rows is not None:
        layer_pass.sent = engine.rank_rows.route(layer_pass.layer, expert_ids_TK)
        return exchanged_forward(x_TD, weights_TK, engine, layer_pass, phase, keep)
    experts = ForwardPass(x_TD, expert_ids_TK, engine, layer_pass, phase, keep)
    experts.compute()
    return experts.combine(weights_TK)


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
    args = x_TD, weights_TK, dy_TD.contiguous(), engine, layer_pass, need_dw
    if layer_pass.sent is not None:
        return exchanged_backward(*args)
    experts = BackwardPass(*args)
    experts.compute()
    experts.finish()
    return experts.combine()
