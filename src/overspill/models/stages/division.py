"""The stages of a transformers model."""

from torch import nn

from overspill.core.errors import ConfigError
from overspill.core.layer_map import StagePart
from overspill.models.huggingface.adapt import experts_paths
from overspill.models.stages.blocks import find_blocks
from overspill.plan.stages import BlockCost, divide_blocks


def divide_model(
    model: nn.Module, n_stages: int, n_experts: int, expert_numel: int, itemsize: int
) -> list[StagePart]:
    """Runs of blocks. Times are taken to be in proportion to the parameters that a token passes,
    memory to all of them."""
    blocks, experts = find_blocks(model), experts_paths(model)
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    top_k = getattr(config, "num_experts_per_tok", None) or 2
    costs, counts = [], []
    for path in blocks:
        inside = [name for name in experts if name.startswith(f"{path}.")]
        dense = sum(
            parameter.numel()
            for name, parameter in model.get_submodule(path).named_parameters(path)
            if not any(name.startswith(f"{module}.") for module in inside)
        )
        active = dense + len(inside) * top_k * expert_numel
        whole = dense + len(inside) * n_experts * expert_numel
        costs.append(BlockCost(float(active), whole * itemsize))
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
