"""`overspill.offload`: moves the experts of a model to an engine, in place."""

import dataclasses
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId
from overspill.core.interrupt import DeferredInterrupt
from overspill.core.lifetime import outside_engine_threads
from overspill.models.budgets import Budgets, Size
from overspill.models.cpu_costs import cpu_expert_costs
from overspill.models.expert_layers import ExpertLayer, check_layers, check_weights
from overspill.models.progress_bar import TerminalProgress
from overspill.models.ranks import (
    check_supported,
    checksum,
    digest,
    facts,
    rank_budgets,
    rank_layers,
    rank_part,
)
from overspill.models.shard_dense import check_shardable, device_bytes, shard_dense
from overspill.models.sharing import may_share, place_shared, share_experts
from overspill.models.snapshot import ModelSnapshot
from overspill.moe.dense_weights import buffer_bytes, dense_blocks
from overspill.moe.engine import Engine
from overspill.moe.layer import MoE
from overspill.moe.model_part import ModelPart
from overspill.moe.settings import Settings
from overspill.parallel.ranks import Ranks
from overspill.plan.budget import ModelSizes, place
from overspill.plan.exchange_groups import check_groups
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress
from overspill.trace.recorder import Recorder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("overspill")
_READERS = 8
"""Reader threads: enough to keep an NVMe disk busy."""
_BUFFERS = 3 << 29
"""Maximum bytes of experts in buffers at once, where they cannot be read into place."""


def offload(
    model: nn.Module,
    gpu_memory: Size = None,
    host_memory: Size = None,
    disk: str | Path | None = None,
    device: str | torch.device | None = None,
    mode: str = "auto",
    slots: int | None = None,
    host_slots: int | None = None,
    *,
    settings: Settings | None = None,
    state_dtype: torch.dtype = torch.float32,
    keep_gradients: bool | None = None,
    gpu_experts: int | None = None,
    dense_states: str = "auto",
    dense_weights: str = "auto",
    progress: bool | Progress = True,
    quiet: bool = False,
    mesh: "DeviceMesh | None" = None,
    shard_dense: bool = False,
    stages: int | None = None,
) -> nn.Module:
    """Moves the model to the compute device and its experts to the memory the budgets allow.

    The model is changed in place and returned; `model.overspill` is its engine. If this fails or is
    interrupted, the model is what it was. In training mode memory for optimizer states is planned;
    call `model.eval()` first to offload for inference.

    Args:
        model: a `GPTMoE`, a Mixture-of-Experts model of Hugging Face transformers, or any model
            with `MoELayer`s.
        gpu_memory: GPU memory the model may use; default: all that is free, or an equal share of
            it if several models have no budget.
        host_memory: host memory the process may use; default: 95% of what is free.
        disk: folder for experts that do not fit in host memory; default: no disk is used.
        device: the compute device; default: the GPU if there is one.
        mode: where experts are kept: "auto" (from the budgets), "gpu", "host" or "disk".
        slots: experts on the compute device; overrides `gpu_memory`.
        host_slots: experts in host memory in front of the disk; overrides `host_memory`.
        settings: switches of the engine.
        state_dtype: data type of the optimizer's moments.
        keep_gradients: whether to plan memory for gradients that are kept for clipping or
            accumulation; default: only if a disk folder is given.
        gpu_experts: experts that live on the compute device with their optimizer states, so that
            nothing of them is transferred; default: all if they fit, else none.
        dense_states: where the optimizer states of the dense part (attention, embeddings, head)
            are: "gpu", "host" (pinned memory that the GPU reads and writes over PCIe), or "auto"
            (on the host if the GPU budget is small for them).
        dense_weights: where its weights and gradients are: "gpu", "host" (copied to the GPU block
            by block), or "auto" (on the host if the GPU budget does not hold them). On the host,
            so are the optimizer states.
        progress: show a progress bar, or a function that is called with (what, done, total).
        quiet: do not print where the experts are.
        mesh: ranks among which the experts of each layer are divided, in training; a
            `torch.distributed.device_mesh.DeviceMesh` of one dimension, or of the dimensions
            ("data", "expert") for several nodes, which divide the experts in the same way, either
            one with "stage" before "expert". Each
            rank passes the same model and its own part of the batch; the loss is the mean over
            ranks. Those of a node share `host_memory` and `disk`; the other budgets are those of
            each rank.
        shard_dense: whether the ranks of the mesh divide the dense weights, their gradients and
            optimizer states too, with FSDP2. Gathers each block's weights when it computes.
        stages: how many pipeline stages `overspill.Stages` divides the model into; needed if the
            mesh has a dimension "stage", whose ranks then divide the layers (see docs/stages.md).
    """
    budgets = Budgets(
        gpu_memory, host_memory, disk, device, mode, slots, host_slots, settings or Settings(),
        state_dtype, keep_gradients, gpu_experts, dense_states, dense_weights, mesh, shard_dense,
        stages,
    )  # fmt: skip
    return offload_within(model, budgets, progress, quiet)


def offload_within(
    model: nn.Module, budgets: Budgets, progress: bool | Progress = True, quiet: bool = False
) -> nn.Module:
    """`offload` with all budgets in one object."""
    if hasattr(model, "set_experts_implementation"):  # avoids an import of transformers
        from overspill.models.huggingface.adapt import adapt, find_experts

        found = find_experts(model)
        check_weights(model)
        return move_experts(
            model, found, budgets, progress, quiet, finish=lambda: adapt(model, found)
        )
    types = _layer_types()
    layers = {path: module for path, module in model.named_modules() if isinstance(module, types)}
    if not layers:
        raise ConfigError("the model has no Mixture-of-Experts layer that Overspill supports")
    if budgets.stages is not None:
        raise ConfigError(f"stages={budgets.stages} needs a model of Hugging Face transformers")
    check_layers(layers, model.training)
    check_weights(model, [p for layer in layers.values() for p in layer.expert_parameters()])
    return move_experts(model, [*layers.values()], budgets, progress, quiet)


def _layer_types() -> tuple[Any, ...]:
    """`MoELayer` is not imported here, because it imports torch's compiler, which takes seconds: a
    model with such a layer has imported it."""
    module = sys.modules.get("overspill.moe.moe_layer")
    return (MoE,) if module is None else (MoE, module.MoELayer)


class ExpertSource(Protocol):
    """Where weights of experts come from, if not from the model."""

    @property
    def copies(self) -> bool:
        """Whether `fill` needs buffers of its own."""

    def fill(self, expert: ExpertId, record: Tensor) -> None: ...


def move_experts(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    budgets: Budgets,
    progress: bool | Progress = True,
    quiet: bool = False,
    source: ExpertSource | None = None,
    finish: Callable[[], object] = lambda: None,
) -> nn.Module:
    """Moves the experts of `layers` to a new engine, `model.overspill`, and the rest of the model
    to the compute device, then calls `finish`. Without `source` the weights of the layers are
    copied. They are released when all has succeeded; a failure leaves the model as it was."""
    device = budgets.compute_device
    ranks = None if budgets.mesh is None else Ranks(budgets.mesh, device)
    args = model, layers, budgets, progress, quiet, source
    # what is made here outlives an inference mode of the caller
    with torch.inference_mode(False), budgets.claimed(device):
        if ranks is None or ranks.size == 1:
            return _move_experts(*args, finish, None, lambda: None)
        with ranks.together("offloading the model") as agree:
            check_supported(model, budgets.settings)
            return _move_experts(*args, finish, ranks, agree)


def _move_experts(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    budgets: Budgets,
    progress: bool | Progress,
    quiet: bool,
    source: ExpertSource | None,
    finish: Callable[[], object],
    ranks: Ranks | None,
    agree: Callable[[], None],
) -> nn.Module:
    """`agree` raises on all ranks if one of them has failed."""
    device = budgets.compute_device
    layout = RecordLayout(layers[0].shape, layers[0].dtype, budgets.state_dtype)
    experts, every_layer = ExpertMap.whole(layers[0].n_experts), layers
    layer_map = rank_layers(model, layers, budgets, ranks)
    layers = [every_layer[number] for number in layer_map.own]
    if ranks is not None:
        experts, budgets = rank_part(experts.n_global, ranks.node), rank_budgets(budgets, ranks)
        check_groups(budgets.settings.exchange_groups, experts.n_global, ranks.node.size)
    request = budgets.request(device, 1 if ranks is None else ranks.on_machine)
    if ranks is not None:
        # after all have seen how much memory is free, and before one allocates it
        ranks.check_same(facts(model, every_layer, layout, budgets))
    parameters = [p for layer in every_layer for p in layer.expert_parameters()]
    sizes = _sizes(model, parameters, layout, len(layers), experts.n_local)
    settings = budgets.settings
    if budgets.shard_dense:
        check_shardable(model, parameters, ranks, device)
        assert ranks is not None
        sizes = dataclasses.replace(
            sizes,
            dense=device_bytes(model, parameters, ranks.size),
            dense_states=-(-sizes.dense_states // ranks.size),
        )
    sharing = None
    if ranks is not None and may_share(settings, device, ranks):
        n_experts = experts.n_global
        placement, why_not = place_shared(sizes, request, settings, layout, n_experts, ranks.size)
        sharing = share_experts(
            ranks, agree, settings, why_not, layout, len(layers), n_experts, device
        )
    else:
        placement = place(sizes, request)
    with ExitStack() as undo:
        with _shown(progress) as show:
            costs = None
            if placement.mode != "gpu":
                costs = cpu_expert_costs(layout, device, budgets.settings, show)
            if placement.mode == "gpu":
                _log.info("all experts compute on %s: they fit there", device)
            with DeferredInterrupt() as interrupt:
                engine = Engine(
                    ModelPart(layer_map, experts, ranks, sharing), layout, device, placement,
                    settings, Recorder(device=device), budgets.folder, show, costs,
                )  # fmt: skip
                undo.callback(engine.close)
                _fill(engine, layers, source, show, interrupt)
                undo.callback(ModelSnapshot(model).restore)
                for number, layer in enumerate(every_layer):
                    if number in layer_map.own:
                        layer.give_away(engine, layer_map.own.index(number))
                    else:
                        cast(Any, layer).leave_to_others(engine)
                engine.dense.hold(model)  # first: the device may not hold them all
                model.to(device)
                _close_with(engine, layers)
                model.overspill = engine  # type: ignore[assignment]
                finish()
                agree()
        if not quiet:
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
        budget = None if budgets.gpu_memory is None else request.gpu_memory
        engine.memory.limit(budget)
    return model


def _sizes(
    model: nn.Module,
    experts: Sequence[nn.Parameter],
    layout: RecordLayout,
    n_layers: int,
    n_local: int,
) -> ModelSizes:
    training = model.training
    blocks = dense_blocks(model, set(map(id, experts)))
    dense = dense_states = 0
    for parameter in (p for block in blocks for p in block.parameters):
        dense += parameter.nbytes * (2 if training else 1)  # weight and gradient
        # both moments, and the low bits of a bf16 master
        low = 2 if parameter.dtype == torch.bfloat16 else 0
        each = 2 * layout.state_dtype.itemsize + low if training else 0
        dense_states += parameter.numel() * each
    shape = layout.shape
    row = (2 * shape.in_rows + 2 * shape.d_hidden + 3 * shape.d_model) * layout.dtype.itemsize
    return ModelSizes(
        n_layers,
        n_local,
        layout.weight_bytes,
        layout.state_bytes,
        dense,
        dense_states,
        row,
        training,
        buffer_bytes(blocks, training),
    )


def _fill(
    engine: Engine,
    layers: Sequence[ExpertLayer],
    source: ExpertSource | None,
    progress: Progress | None,
    interrupt: DeferredInterrupt,
) -> None:
    """Fills the records of all experts, from the layers or from `source`."""
    done, lock = 0, threading.Lock()
    replicas = None if engine.ranks is None else engine.ranks.replicas
    checksums: dict[ExpertId, int] = {}

    def fill(expert: ExpertId, record: Tensor) -> None:
        nonlocal done
        interrupt.check()
        if source is not None:
            source.fill(ExpertId(engine.layer_map.own[expert.layer], expert.index), record)
        else:
            layers[expert.layer].fill(expert.index, record, engine.device)
        if replicas is not None:
            checksums[expert] = checksum(record)
        with lock:
            done += engine.layout.weight_bytes
            if progress is not None:
                progress("filling the store", done, engine.records.weights_bytes)

    if source is None:
        engine.records.fill(fill)
    else:
        placement = engine.placement  # a buffer on the way to the disk or the device
        staged = placement.mode != "host" or placement.homes > 0
        buffers = engine.layout.weight_bytes * (int(staged) + 2 * int(source.copies))
        engine.records.fill(fill, reader_threads(buffers), on_host=True)
    if replicas is not None:
        weights = digest(sorted(checksums.items()))
        replicas.check_same({"a digest of the experts that several nodes hold": weights})


def reader_threads(buffers: int, most: int = _BUFFERS) -> int:
    """Threads that read experts, where each needs `buffers` bytes and all together `most`."""
    return _READERS if buffers == 0 else max(1, min(_READERS, most // buffers))


class _Keeper:
    """Referenced by the placeholders of all layers; collected when no model uses the experts."""


def _close_with(engine: Engine, layers: Sequence[ExpertLayer]) -> None:
    """Stops the engine's threads once the model and its optimizer are collected, or at exit."""
    keeper = _Keeper()
    for layer in layers:
        layer.experts.hold(keeper)
    weakref.finalize(keeper, lambda: outside_engine_threads(engine.close))


@contextmanager
def _shown(progress: bool | Progress) -> Iterator[Progress | None]:
    """A progress bar on a terminal, the function of the caller, or None."""
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
