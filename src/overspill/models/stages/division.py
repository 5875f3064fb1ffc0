"""Divides the blocks of a model into stages."""

from typing import Any

import torch
from torch import nn

from overspill.core.errors import ConfigError
from overspill.core.layer_map import StagePart
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.find_experts import experts_paths
from overspill.models.placement_costs import measured_costs
from overspill.models.stages.blocks import find_blocks
from overspill.parallel.ranks import Ranks
from overspill.plan.stages import (
    UNMEASURED,
    BlockCost,
    ExpertTimes,
    block_seconds,
    check_stages,
    divide_blocks,
)
from overspill.tiers.layout import RecordLayout


def expert_times(
    model: nn.Module,
    n_stages: int,
    layout: RecordLayout,
    device: torch.device,
    ranks: Ranks | None,
) -> ExpertTimes:
    """Return the times of an expert for the division of a model, which the first rank measures on
    its GPU for all. A CPU uploads nothing. Raises before it measures if there are too few
    blocks."""
    check_stages(n_stages, len(find_blocks(model)))
    if device.type == "cpu":
        return UNMEASURED
    costs = measured_costs(layout, device)
    times = ExpertTimes(costs.row, costs.upload)
    return times if ranks is None else ExpertTimes(*ranks.gather(tuple(times))[0])


def divide_model(
    model: nn.Module,
    n_stages: int,
    n_experts: int,
    expert_numel: int,
    itemsize: int,
    times: ExpertTimes = UNMEASURED,
) -> list[StagePart]:
    """Return runs of blocks. A dense parameter is assumed to take as long as one of an expert."""
    blocks, experts = find_blocks(model), experts_paths(model)
    config: Any = model.config
    if isinstance(model, GPTMoE):
        top_k = config.top_k
    else:
        top_k = getattr(config.get_text_config(), "num_experts_per_tok", None) or 2
    costs, counts = [], []
    for path in blocks:
        inside = [name for name in experts if name.startswith(f"{path}.")]
        dense = sum(
            parameter.numel()
            for name, parameter in model.get_submodule(path).named_parameters(path)
            if not any(name.startswith(f"{module}.") for module in inside)
        )
        seconds = block_seconds(dense / expert_numel, len(inside), top_k, n_experts, times)
        whole = dense + len(inside) * n_experts * expert_numel
        costs.append(BlockCost(seconds, whole * itemsize))
        counts.append(len(inside))
    stages, layer = [], 0
    for run in divide_blocks(costs, n_stages):
        count = sum(counts[run.start : run.stop])
        stages.append(StagePart(run, range(layer, layer + count)))
        layer += count
    return stages


def check_ranks(stages: list[StagePart], n_ranks: int) -> None:
    """Raises unless each of the ranks that divide the stages gets experts."""
    for rank in range(n_ranks):
        if not any(len(stage.layers) for stage in stages[rank::n_ranks]):
            raise ConfigError(
                f"{len(stages)} stages leave rank {rank} of {n_ranks} without experts; give more "
                "stages, or fewer ranks along them"
            )
