"""Whether ranks compute experts of each other, and the host memory that they share for that."""

import dataclasses
import logging
import socket
from collections.abc import Callable

import torch

from overspill.core.errors import BudgetError, ConfigError
from overspill.core.expert_map import ExpertMap
from overspill.models.placement_costs import BALANCE_ROWS, measured_costs
from overspill.moe.row_placer import Sharing
from overspill.moe.settings import Settings
from overspill.parallel.ranks import Ranks
from overspill.parallel.shared_files import close_files, exchange_files
from overspill.plan.budget import BudgetRequest, ModelSizes, Placement, place
from overspill.plan.placement import PlacementCosts, outbox_slots
from overspill.tiers.layout import RecordLayout
from overspill.tiers.shared_experts import RankMemory, RankSizes, SharedExperts
from overspill.tiers.shared_memory import SharedMemory, map_file

_log = logging.getLogger("overspill")


def may_share(settings: Settings, device: torch.device, ranks: Ranks) -> bool:
    """Return whether dynamic placement is wanted, which is the same on all ranks. "auto" means
    no on CPUs, which upload nothing and whose cores share one memory. Raises if several nodes
    want it."""
    if ranks.replicas is not None or ranks.stages is not None:
        why = "several nodes" if ranks.stages is None else "ranks that divide the layers"
        if settings.placement == "dynamic":
            raise ConfigError(
                f'placement="dynamic" is not supported with {why}; give "static" or "auto"'
            )
        _log.info("owners compute their experts: there are %s", why)
        return False
    if settings.cpu_experts:
        _log.info("owners compute their experts: the CPU computes some of them")
        return False
    wanted = settings.placement == "auto" and device.type == "cuda"
    return wanted or settings.placement == "dynamic"


def place_shared(
    model: ModelSizes,
    request: BudgetRequest,
    settings: Settings,
    layout: RecordLayout,
    n_experts: int,
    n_ranks: int,
) -> tuple[Placement, str | None]:
    """Return the placement, and why dynamic placement is not possible with it. Dynamic placement
    needs host memory for gradients that ranks compute for each other. If it is required, no expert
    moves to the GPU by itself."""
    slots = 2 * outbox_slots(n_experts, n_ranks)
    outbox = RankSizes(0, layout.weight_bytes, slots, n_ranks).total
    with_room = dataclasses.replace(request, host_memory=max(0, request.host_memory - outbox))
    if settings.placement == "dynamic":
        placement = place(model, dataclasses.replace(with_room, residency=False))
        return placement, _why_not_in_host(placement)
    placement = place(model, request)
    why = _why_not_in_host(placement)
    if why is None:
        try:
            return place(model, with_room), None
        except BudgetError as error:
            why = f"gradients between ranks need more host memory: {error}"
    return placement, why


def _why_not_in_host(placement: Placement) -> str | None:
    if placement.mode == "host" and not placement.residents and not placement.fills:
        return None
    return (
        'experts live on the GPU or on disk; give mode="host" and a budget that holds them in host '
        "memory"
    )


def share_experts(
    ranks: Ranks,
    agree: Callable[[], None],
    settings: Settings,
    why_not: str | None,
    layout: RecordLayout,
    n_layers: int,
    n_experts: int,
    device: torch.device,
) -> Sharing | None:
    """Create memory that all ranks map, if they can compute experts of each other; `why_not` says
    why this rank cannot. All ranks call this; `agree` raises if one of them has failed."""
    agree()  # first: the others would wait here for a rank that has no placement
    forced = settings.placement == "dynamic"
    why = _why_static(ranks, why_not, device, forced)
    if why is not None:
        if forced:
            raise ConfigError(f'placement="dynamic" is not possible: {why}')
        _log.info("owners compute their experts: %s", why)
        return None
    parts = [ExpertMap.part(n_experts, rank, ranks.size) for rank in range(ranks.size)]
    slots = 2 * outbox_slots(n_experts, ranks.size)
    sizes = [
        RankSizes(n_layers * part.n_local, layout.weight_bytes, slots, ranks.size) for part in parts
    ]
    memories = _share(ranks, agree, sizes)
    costs = BALANCE_ROWS if forced else _measured(ranks, agree, layout, device)
    return Sharing(SharedExperts(ranks.rank, memories, parts), costs)


def _why_static(
    ranks: Ranks, why_not: str | None, device: torch.device, forced: bool
) -> str | None:
    """Return why placement is static, which is the same on all ranks; None if it is dynamic."""
    gpu = None
    if device.type == "cuda":
        gpu = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    found = ranks.gather((why_not, gpu))
    for rank, (why, _) in enumerate(found):
        if why is not None:
            return f"on rank {rank} {why}"
    gpus = [gpu for _, gpu in found]
    if not forced and len(set(gpus)) < len(gpus):
        return "ranks share a GPU, which computes all token rows in any case"
    return None


def _share(ranks: Ranks, agree: Callable[[], None], sizes: list[RankSizes]) -> list[RankMemory]:
    """Create the memory of this rank, and map the memory of the others."""
    own = sizes[ranks.rank]
    memory = SharedMemory(own.total, populated=own.weights)
    try:
        agree()  # a rank that the system has refused memory does not come to the exchange
        files = exchange_files(ranks, memory.file)
    finally:
        memory.close_file()
    mapped = []
    try:
        for rank, file in enumerate(files):
            bytes = memory.bytes if rank == ranks.rank else map_file(file, sizes[rank].total)
            mapped.append(RankMemory(bytes, sizes[rank]))
    finally:
        close_files(files)
    agree()
    return mapped


def _measured(
    ranks: Ranks, agree: Callable[[], None], layout: RecordLayout, device: torch.device
) -> PlacementCosts:
    """Return the costs that rank 0 has measured: all ranks must plan with the same costs."""
    costs = measured_costs(layout, device) if ranks.rank == 0 else None
    agree()
    first: PlacementCosts = ranks.gather(costs)[0]
    return first
