"""`overspill.offload`: moves the experts of a model to an engine, in place."""

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from overspill.core.errors import ConfigError
from overspill.core.interrupt import DeferredInterrupt
from overspill.core.lifetime import outside_engine_threads
from overspill.core.options import takes
from overspill.hardware.profile import ExpertCosts
from overspill.models.budgets import Budgets, OffloadOptions
from overspill.models.cpu_costs import cpu_expert_costs
from overspill.models.expert_layers import ExpertLayer, check_layers, check_weights
from overspill.models.fill import ExpertSource, fill_experts
from overspill.models.offload_plan import OffloadPlan, plan_offload
from overspill.models.predictor import new_observer
from overspill.models.progress_bar import TerminalProgress
from overspill.models.ranks import check_supported, of_one_rank
from overspill.models.shard_dense import shard_dense
from overspill.models.snapshot import ModelSnapshot
from overspill.moe.engine import Engine
from overspill.moe.layer import MoE
from overspill.moe.predictor import Observer
from overspill.parallel.ranks import Ranks
from overspill.tiers.layout import NO_LOW_RANKS
from overspill.tiers.slab import Progress
from overspill.trace.recorder import Recorder

if TYPE_CHECKING:
    pass

_log = logging.getLogger("overspill")


@takes(OffloadOptions)
def offload(model: nn.Module, options: OffloadOptions) -> nn.Module:
    """Moves the model to the compute device and its experts to the memory the budgets allow.

    The model is changed in place and returned; `model.overspill` is its engine. If this fails or is
    interrupted, the model is what it was. In training mode memory for optimizer states is planned;
    call `model.eval()` first to offload for inference. What is frozen gets none: experts that are
    all frozen cannot be trained afterwards. `model` is a `GPTMoE`, a Mixture-of-Experts model of
    Hugging Face transformers, or any model with `MoELayer`s. Arguments after `disk` are given by
    name.
    """
    return offload_within(model, Budgets(**vars(options)))


def offload_within(model: nn.Module, budgets: Budgets) -> nn.Module:
    """Run `offload` with all arguments in one object."""
    if hasattr(model, "set_experts_implementation"):  # avoids an import of transformers
        from overspill.models.huggingface.adapt import adapt
        from overspill.models.huggingface.dictionaries import cast_routers
        from overspill.models.huggingface.find_experts import find_experts

        budgets.settings.check_model(cast(Any, model).config.model_type)
        found = find_experts(model)
        check_weights(model)
        cast_routers(model)  # before dense weights are counted and placed
        return move_experts(model, found, budgets, finish=lambda: adapt(model, found))
    budgets.settings.check_model(type(model).__name__)
    types = _layer_types()
    layers = {path: module for path, module in model.named_modules() if isinstance(module, types)}
    if not layers:
        raise ConfigError("the model has no Mixture-of-Experts layer that Overspill supports")
    check_layers(layers, model.training)
    check_weights(model, [p for layer in layers.values() for p in layer.expert_parameters()])
    return move_experts(model, [*layers.values()], budgets)


def _layer_types() -> tuple[Any, ...]:
    """Return the types of our own MoE layers. `MoELayer` is not imported here, because it imports
    torch's compiler, which takes seconds: a model with such a layer has imported it."""
    module = sys.modules.get("overspill.moe.moe_layer")
    return (MoE,) if module is None else (MoE, module.MoELayer)


def move_experts(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    budgets: Budgets,
    source: ExpertSource | None = None,
    finish: Callable[[], object] = lambda: None,
) -> nn.Module:
    """Moves the experts of `layers` to a new engine, `model.overspill`, and the rest of the model
    to the compute device, then calls `finish`. Without `source` the weights of the layers are
    copied. The layers release them when all has succeeded; a failure leaves the model as it was."""
    device = budgets.compute_device
    ranks = None if budgets.mesh is None else Ranks(budgets.mesh, device)
    args = model, layers, budgets, source, finish
    # tensors that are made here outlive an inference mode of the caller
    with torch.inference_mode(False), budgets.claimed(device):
        if ranks is None or ranks.size == 1:
            return _move_experts(*args, None, lambda: None)
        with ranks.together("offloading the model") as agree:
            check_supported(model, budgets.settings)
            with of_one_rank(ranks):
                return _move_experts(*args, ranks, agree)


def _move_experts(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    budgets: Budgets,
    source: ExpertSource | None,
    finish: Callable[[], object],
    ranks: Ranks | None,
    agree: Callable[[], None],
) -> nn.Module:
    """Move the experts of this rank. `agree` raises on all ranks if one of them has failed."""
    packed, low_ranks = (None, NO_LOW_RANKS) if source is None else (source.format, source.ranks)
    plan = plan_offload(model, layers, budgets, ranks, agree, packed, low_ranks)
    device = budgets.compute_device
    held = [layers[number] for number in plan.part.layers.own]
    parameters = [p for layer in layers for p in layer.expert_parameters()]
    with ExitStack() as undo:
        with _shown(budgets.progress) as show:
            costs = _cpu_costs(plan, device, show)
            with DeferredInterrupt() as interrupt:
                engine = Engine(
                    plan.part, plan.layout, device, plan.placement, plan.settings,
                    Recorder(device=device), budgets.folder, show, costs,
                )  # fmt: skip
                undo.callback(engine.close)
                fill_experts(engine, held, source, show, interrupt)
                undo.callback(ModelSnapshot(model).restore)
                _replace_experts(engine, layers)
                engine.dense.hold(model)  # first: the device may not hold them all
                model.to(device)
                _close_with(engine, held)
                model.overspill = engine  # type: ignore[assignment]
                engine.popularity.new_observer = _new_observer(model)
                finish()
                agree()
        if not budgets.quiet:
            print(engine.describe(), file=sys.stderr)
        undo.pop_all()
    if ranks is not None:  # accelerate must not average gradients too
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        if budgets.shard_dense:  # last: it cannot be undone
            shard_dense(model, ranks)
    for parameter in parameters:  # others, as an optimizer, may still refer to them
        parameter.data = parameter.data.new_empty(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        engine.memory.limit(plan.gpu_memory)
    return model


def _cpu_costs(
    plan: OffloadPlan, device: torch.device, progress: Progress | None
) -> ExpertCosts | None:
    """Return the measured costs of CPU experts; None if all experts are on the device."""
    if plan.placement.mode == "gpu":
        _log.info("all experts compute on %s: they fit there", device)
        return None
    return cpu_expert_costs(plan.layout, device, plan.settings, progress)


def _replace_experts(engine: Engine, layers: Sequence[ExpertLayer]) -> None:
    """Replace the experts of all layers by placeholders, also in layers of other ranks."""
    own = engine.layer_map.own
    for number, layer in enumerate(layers):
        if number in own:
            layer.give_away(engine, own.index(number))
        else:
            cast(Any, layer).leave_to_others(engine)


def _new_observer(model: nn.Module) -> Callable[[], Observer | None]:
    """Make a popularity predictor, which must not keep the model alive."""
    reference = weakref.ref(model)

    def new() -> Observer | None:
        whole = reference()
        return None if whole is None else new_observer(whole, distances=(1, 2))

    return new


class _Keeper:
    """Object to which the placeholders of all layers refer; it is collected when no model uses the
    experts."""


def _close_with(engine: Engine, layers: Sequence[ExpertLayer]) -> None:
    """Stop the engine's threads once the model and its optimizer are collected, or at exit."""
    keeper = _Keeper()
    for layer in layers:
        layer.experts.hold(keeper)
    weakref.finalize(keeper, lambda: outside_engine_threads(engine.close))


@contextmanager
def _shown(progress: bool | Progress) -> Iterator[Progress | None]:
    """Return a progress bar on a terminal, the function of the caller, or None."""
    if not isinstance(progress, bool):
        yield progress
    elif not progress or not sys.stderr.isatty():
        yield None
    else:
        bar = TerminalProgress()
        try:
            yield bar
        finally:
            bar.stop()
