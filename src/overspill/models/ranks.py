"""`overspill.offload` on several ranks: what each gets, and what must be the same on all."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.core.expert_map import ExpertMap
from overspill.hardware.machine import cpu_threads
from overspill.models.budgets import Budgets
from overspill.models.expert_layers import ExpertLayer
from overspill.moe.settings import Settings
from overspill.parallel.ranks import Ranks
from overspill.tiers.layout import RecordLayout


def check_supported(model: nn.Module, settings: Settings) -> None:
    """Raises for what several ranks cannot do yet."""
    if not model.training:
        raise ConfigError(
            "a mesh supports training only, and the model is in evaluation mode; call "
            "model.train() before overspill.offload, or leave out the mesh"
        )
    if settings.cpu_experts or settings.cpu_policy is not None:
        raise ConfigError("a mesh does not support cpu_experts yet; turn one of them off")


def rank_part(n_experts: int, ranks: Ranks) -> ExpertMap:
    """The experts of this rank."""
    if ranks.size > n_experts:
        raise ConfigError(
            f"the mesh has {ranks.size} ranks for {n_experts} experts of each layer; give at most "
            f"{n_experts} ranks"
        )
    return ExpertMap.part(n_experts, ranks.rank, ranks.size)


def divide_cores(budgets: Budgets, ranks: Ranks) -> Budgets:
    """The ranks of a machine share its cores, unless a number of threads is given."""
    settings = budgets.settings
    threads = settings.threads or max(1, cpu_threads() // ranks.size)
    return dataclasses.replace(budgets, settings=dataclasses.replace(settings, threads=threads))


def facts(
    model: nn.Module, layers: Sequence[ExpertLayer], layout: RecordLayout, settings: Settings
) -> dict[str, str]:
    """What must be the same on all ranks, so that they make the same calls with the same dense
    weights."""
    experts = {id(p) for layer in layers for p in layer.expert_parameters()}
    dense = [(name, p) for name, p in model.named_parameters() if id(p) not in experts]
    trained = [p.requires_grad for layer in layers for p in layer.expert_parameters()]
    shapes = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in dense]
    config = vars(model.config) if hasattr(model, "config") else {}
    return {
        "the class of the model": type(model).__name__,
        **{f"config.{name}": repr(value) for name, value in config.items() if name[0] != "_"},
        "the number of MoE layers": str(len(layers)),
        "the experts of a layer": f"{layers[0].n_experts} of {layout.shape}, {layout.dtype}",
        "a digest of which experts are frozen": _digest(trained),
        "a digest of the names and shapes of dense parameters": _digest(shapes),
        "a digest of the dense weights (give all ranks the same seed)": _digest(
            list(_checksums([*(p for _, p in dense), *model.buffers()]))
        ),
        "recomputation of blocks": str(getattr(model, "checkpoint", None)),
        "state_dtype": str(layout.state_dtype),
        "Settings.activations": settings.activations,
        "Settings.placement": settings.placement,
        "Settings.shared_balance": str(settings.shared_balance),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _checksums(tensors: Sequence[Tensor]) -> Iterator[int]:
    """Sums of whole numbers: the same on all ranks for the same bits, in any order."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor in tensors:
        if tensor.numel() and tensor.itemsize in integers:
            flat = tensor.detach().contiguous().view(-1).view(integers[tensor.itemsize])
            yield int(flat.sum(dtype=torch.int64))
