"""Dense parameters that all ranks divide, with FSDP2: weights, gradients and optimizer states.

The weights of a block are gathered before its forward and before its backward, and released after
each. Gradients are averaged and divided when a block's backward ends.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.moe.pregate import positions
from overspill.parallel.ranks import Ranks
from overspill.parallel.sharded import as_sharded, is_sharded, part_of


def check_shardable(
    model: nn.Module, experts: Sequence[Tensor], ranks: Ranks | None, device: torch.device
) -> None:
    """Raise for models that cannot be divided, before anything is changed."""
    if ranks is None:
        raise ConfigError(
            "--shard-dense divides dense parameters among ranks, and there is one; drop it, or "
            "resume with --no-shard-dense"
        )
    if device.type != ranks.device_type:
        raise ConfigError(f"--shard-dense needs a GPU for each rank; here they share {device}")
    if any(positions(model)):
        raise ConfigError(
            "--shard-dense does not support pre-gates, whose weights are used outside of their "
            "block; turn one of them off"
        )
    excluded, seen = {id(p) for p in experts}, set[int]()
    for unit, modules in _groups(model):
        parameters = [p for module in modules for p in module.parameters(recurse=False)]
        found = {id(p): p for p in parameters if id(p) not in excluded}
        if len({p.dtype for p in found.values()}) > 1 or seen & found.keys():
            raise ConfigError(
                f"--shard-dense does not support {type(unit).__name__}: a block must have "
                "parameters of one data type, and share none with other blocks"
            )
        seen |= found.keys()


def _groups(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield the modules that are gathered together: the modules of each unit, and the rest."""
    inside: set[nn.Module] = set()
    for unit in units(model):
        modules = list(unit.modules())
        inside.update(modules)
        yield unit, modules
    yield model, [module for module in model.modules() if module not in inside]


def shard_dense(model: nn.Module, ranks: Ranks) -> None:
    """Divides the dense parameters of an offloaded model, in place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = ranks.line()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    experts = {p for p in model.parameters() if hasattr(p, "is_expert_placeholder")}
    for module in (*units(model), model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,  # also modules outside of blocks, which may be loaded
            mp_policy=policy,
            ignored_params=experts,
        )
    model.register_load_state_dict_pre_hook(_divide)


def _divide(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Let `load_state_dict` accept whole tensors, of which each rank takes its part."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if value is not None and is_sharded(parameter) and not is_sharded(value):
            part = part_of(value.to(parameter.device), parameter.detach())
            state_dict[prefix + name] = as_sharded(part, parameter.detach())


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights are gathered together: the elements of each outermost
    ModuleList, which are decoder layers. The rest is gathered with the model."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return [unit for unit in found if any(p.numel() for p in unit.parameters())]


def device_bytes(model: nn.Module, experts: Sequence[Tensor], n_ranks: int) -> int:
    """Return the bytes of weights and gradients on each device: its part of all, and the whole of
    the modules that are gathered at once: the rest, a block that computes and the next one."""
    excluded = {id(p) for p in experts}

    def nbytes(module: nn.Module) -> int:
        return sum(p.nbytes for p in module.parameters() if id(p) not in excluded)

    blocks = [nbytes(unit) for unit in units(model)]
    total = nbytes(model)
    return 2 * (-(-total // n_ranks) + total - sum(blocks) + 2 * max(blocks, default=0))
