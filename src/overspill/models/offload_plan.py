"""Plans which experts of a model this process gets, and the places of these and of the dense
part."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from overspill.core.expert_map import ExpertMap
from overspill.models.budgets import Budgets
from overspill.models.cpu_costs import check_cpu_experts
from overspill.models.expert_layers import ExpertLayer
from overspill.models.ranks import facts, rank_budgets, rank_layers, rank_part
from overspill.models.shard_dense import check_shardable, device_bytes
from overspill.models.sharing import may_share, place_shared, share_experts
from overspill.moe import unpacking
from overspill.moe.dense_weights import buffer_bytes, dense_blocks
from overspill.moe.model_part import ModelPart
from overspill.moe.settings import Settings
from overspill.parallel.ranks import Ranks
from overspill.plan.budget import BudgetRequest, ModelSizes, Placement, place
from overspill.plan.exchange_groups import check_groups
from overspill.tiers.layout import LowRanks, RecordLayout, WeightFormat


@dataclass(frozen=True)
class OffloadPlan:
    """Parts from which an engine is made."""

    part: ModelPart
    layout: RecordLayout
    placement: Placement
    settings: Settings
    """Settings of this rank."""
    gpu_memory: int | None
    """Budget of the GPU in bytes; None: the model shares the free memory."""


def plan_offload(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    budgets: Budgets,
    ranks: Ranks | None,
    agree: Callable[[], None],
    packed: WeightFormat | None,
    low_ranks: LowRanks,
) -> OffloadPlan:
    """Plan the engine of this rank. All ranks call this; it raises on all of them if they were
    given different models or options. `packed` is the format of packed weights, and `low_ranks` are
    the ranks of low-rank matrices behind them."""
    device = budgets.compute_device
    check_cpu_experts(layers, budgets.settings)
    layout = RecordLayout(layers[0].shape, layers[0].dtype, budgets.state_dtype, packed, low_ranks)
    layer_map = rank_layers(model, layers, budgets, ranks)
    experts = ExpertMap.whole(layers[0].n_experts)
    if ranks is not None:
        experts, budgets = rank_part(experts.n_global, ranks.node), rank_budgets(budgets, ranks)
        check_groups(budgets.settings.exchange_groups, experts.n_global, ranks.node.size)
    part = ModelPart(layer_map, experts, ranks)
    request = budgets.request(device, 1 if ranks is None else ranks.on_machine)
    if ranks is not None:
        # after all have seen how much memory is free, and before one allocates it
        ranks.check_same(facts(model, layers, layout, budgets))
    parameters = [p for layer in layers for p in layer.expert_parameters()]
    frozen = not any(layer.trained for layer in layers)
    sizes = _sizes(model, parameters, layout, part, frozen, device)
    if budgets.shard_dense:
        check_shardable(model, parameters, ranks, device)
        assert ranks is not None
        sizes = dataclasses.replace(
            sizes,
            dense=device_bytes(model, parameters, ranks.size),
            dense_states=-(-sizes.dense_states // ranks.size),
        )
    placement, part = _place(sizes, request, budgets.settings, layout, part, device, agree)
    given = budgets.gpu_memory is not None
    gpu_memory = request.gpu_memory + budgets.device_reserved if given else None
    return OffloadPlan(part, layout, placement, budgets.settings, gpu_memory)


def _sizes(
    model: nn.Module,
    experts: Sequence[nn.Parameter],
    layout: RecordLayout,
    part: ModelPart,
    frozen: bool,
    device: torch.device,
) -> ModelSizes:
    """Return the bytes of the dense part. Frozen parameters have neither gradients nor optimizer
    states; `frozen`: all experts are frozen."""
    training = model.training
    blocks = dense_blocks(model, set(map(id, experts)))
    dense_states = 0
    dense = unpacking.buffer_bytes(layout, device, part.experts.n_local)
    for parameter in (p for block in blocks for p in block.parameters):
        trained = training and parameter.requires_grad
        dense += parameter.nbytes * (2 if trained else 1)  # weight and gradient
        # both moments, and the low bits of a bf16 master
        low = 2 if parameter.dtype == torch.bfloat16 else 0
        each = 2 * layout.state_dtype.itemsize + low if trained else 0
        dense_states += parameter.numel() * each
    shape = layout.shape
    largest = layout.weight_bytes
    smaller = tuple(largest - layout.weight_bytes_in(layer) for layer in range(part.n_layers))
    row = (2 * shape.in_rows + 2 * shape.d_hidden + 3 * shape.d_model) * layout.dtype.itemsize
    return ModelSizes(
        part.n_layers,
        part.experts.n_local,
        largest,
        layout.state_bytes,
        dense,
        dense_states,
        row,
        training,
        buffer_bytes(blocks, training),
        frozen=frozen,
        stage_layers=max((len(stage.layers) for stage in part.layers.stages), default=0),
        smaller=smaller if any(smaller) else (),
    )


def _place(
    sizes: ModelSizes,
    request: BudgetRequest,
    settings: Settings,
    layout: RecordLayout,
    part: ModelPart,
    device: torch.device,
    agree: Callable[[], None],
) -> tuple[Placement, ModelPart]:
    """Return the placement, and the part of this rank, with shared memory if ranks compute experts
    of each other."""
    ranks, n_experts = part.ranks, part.experts.n_global
    if ranks is None or not may_share(settings, device, ranks):
        return place(sizes, request), part
    placement, why_not = place_shared(sizes, request, settings, layout, n_experts, ranks.size)
    sharing = share_experts(
        ranks, agree, settings, why_not, layout, part.n_layers, n_experts, device
    )
    return placement, dataclasses.replace(part, sharing=sharing)
