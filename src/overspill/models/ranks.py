"""`overspill.offload` on several ranks: the part of each rank, and checks that ranks agree."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from overspill.core.errors import BudgetError, ConfigError
from overspill.core.expert_map import ExpertMap
from overspill.core.layer_map import LayerMap
from overspill.hardware.machine import cpu_threads
from overspill.models.budgets import Budgets
from overspill.models.expert_layers import ExpertLayer
from overspill.moe.settings import Settings
from overspill.parallel.ranks import Ranks
from overspill.tiers.layout import RecordLayout


@contextmanager
def of_one_rank(ranks: Ranks) -> Iterator[None]:
    """Context that adds to errors about budgets that they are those of one rank."""
    try:
        yield
    except BudgetError as error:
        raise BudgetError(
            f"{error} (sizes of one rank: each of {ranks.on_machine} has an equal part of "
            "--host-memory and --disk)"
        ) from error


def check_supported(model: nn.Module, settings: Settings) -> None:
    """Raise for options and models that several ranks do not support yet."""
    if not model.training:
        raise ConfigError(
            "a mesh supports training only, and the model is in evaluation mode; call "
            "model.train() before overspill.offload, or leave out the mesh"
        )
    if settings.popularity == "learned":
        raise ConfigError(
            "a mesh does not support popularity='learned' (--popularity learned): a rank does not "
            "see the tokens of others; leave one of them out"
        )


def rank_part(n_experts: int, ranks: Ranks) -> ExpertMap:
    """Return the experts of this rank."""
    if ranks.size > n_experts:
        raise ConfigError(
            f"the mesh has {ranks.size} ranks for {n_experts} experts of each layer; give at most "
            f"{n_experts} ranks that divide them"
        )
    return ExpertMap.part(n_experts, ranks.rank, ranks.size)


def rank_layers(
    model: nn.Module, layers: Sequence[ExpertLayer], budgets: Budgets, ranks: Ranks | None
) -> LayerMap:
    """Return all layers, or the layers of the stages of this rank."""
    n_ranks = 1 if ranks is None else ranks.n_stages
    count = n_ranks if budgets.stages is None else budgets.stages
    if budgets.stages is None and n_ranks == 1:
        return LayerMap.whole(len(layers))
    if not all(hasattr(layer, "leave_to_others") for layer in layers):
        raise ConfigError("pipeline stages need a transformers model or a GPT-MoE")
    from overspill.models.stages.division import (  # only where they are needed
        check_ranks,
        divide_model,
        expert_times,
    )

    if 0 < count < n_ranks:
        raise ConfigError(
            f"{n_ranks} ranks cannot divide {count} stages; give at least {n_ranks} stages"
        )
    if budgets.shard_dense and n_ranks > 1:
        raise ConfigError("shard_dense is not supported with ranks along stages; drop one of them")
    first = layers[0]
    size = first.shape.numel, first.dtype.itemsize
    layout = RecordLayout(first.shape, first.dtype, budgets.state_dtype)
    times = expert_times(model, count, layout, budgets.compute_device, ranks)
    stages = divide_model(model, count, first.n_experts, *size, times)
    check_ranks(stages, n_ranks)
    rank = 0 if ranks is None or ranks.stages is None else ranks.stages.rank
    return LayerMap.of_rank(stages, rank, n_ranks)


def rank_budgets(budgets: Budgets, ranks: Ranks) -> Budgets:
    """Return the budgets of this rank. The ranks of a node share its cores, unless a number of
    threads is given. Gradients of several nodes are kept until they are added up."""
    settings = budgets.settings
    threads = settings.threads or max(1, cpu_threads() // ranks.on_machine)
    keep = budgets.keep_gradients
    return dataclasses.replace(
        budgets,
        settings=dataclasses.replace(settings, threads=threads),
        keep_gradients=True if keep is None and ranks.replicas is not None else keep,
    )


def facts(
    model: nn.Module, layers: Sequence[ExpertLayer], layout: RecordLayout, budgets: Budgets
) -> dict[str, str]:
    """Return facts that must be the same on all ranks, so that they make the same calls with the
    same dense weights."""
    settings = budgets.settings
    experts = {id(p) for layer in layers for p in layer.expert_parameters()}
    dense = [(name, p) for name, p in model.named_parameters() if id(p) not in experts]
    trained = [layer.trained for layer in layers]
    shapes = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in dense]
    config = vars(model.config) if hasattr(model, "config") else {}
    return {
        "the class of the model": type(model).__name__,
        **{f"config.{name}": repr(value) for name, value in config.items() if name[0] != "_"},
        "the number of MoE layers": str(len(layers)),
        "the experts of a layer": f"{layers[0].n_experts} of {layout.shape}, {layout.dtype}",
        "a digest of which experts are frozen": digest(trained),
        "a digest of the names and shapes of dense parameters": digest(shapes),
        "a digest of the dense weights (give all ranks the same seed)": digest(
            [checksum(tensor) for tensor in (*(p for _, p in dense), *model.buffers())]
        ),
        "stages": str(budgets.stages),
        "recomputation of blocks": str(getattr(model, "checkpoint", None)),
        "state_dtype": str(layout.state_dtype),
        "Settings.activations": settings.activations,
        "Settings.cpu_experts": str(settings.cpu_experts),
        "Settings.exchange_groups": str(settings.exchange_groups),
        "Settings.received_rows": settings.received_rows,
        "Settings.placement": settings.placement,
        "Settings.shared_balance": str(settings.shared_balance),
    }


def digest(value: object) -> str:
    """Return a short text that differs for different values."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def checksum(tensor: Tensor) -> int:
    """Return a sum of integers, which is the same for the same bits in any order."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if not tensor.numel() or tensor.itemsize not in integers:
        return 0
    flat = tensor.detach().contiguous().view(-1).view(integers[tensor.itemsize])
    return int(flat.sum(dtype=torch.int64))
