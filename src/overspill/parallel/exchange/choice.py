"""The exchange that the ranks of a mesh use. Layers of the same mesh share one."""

import weakref
from typing import TYPE_CHECKING

import torch

from overspill.core.errors import ConfigError
from overspill.parallel.exchange.collective import CollectiveExchange
from overspill.parallel.exchange.interface import Exchange, LocalExchange
from overspill.parallel.exchange.staged import StagedExchange
from overspill.parallel.ranks import Ranks
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import Inject

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_shared: weakref.WeakValueDictionary[tuple[int, torch.device], Exchange] = (
    weakref.WeakValueDictionary()
)
"""Exchanges by the id of the mesh's group, which lives as long as its exchange. Each exchange has
streams, and perhaps a thread and connections."""


def exchange_for(mesh: "DeviceMesh | None", device: torch.device) -> Exchange:
    """NCCL or gloo by torch.distributed; through host memory if the group cannot send tensors of
    the device. Must be called on all ranks."""
    if mesh is None:
        return LocalExchange(device)
    if mesh.ndim != 1:
        raise ConfigError(
            f"the mesh has {mesh.ndim} dimensions; give the one along which experts are divided, "
            'as in mesh["expert"], and average expert gradients along the others yourself'
        )
    key = id(mesh.get_group()), device
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = exchange_among(Ranks(mesh, device), device)
    return found


def exchange_among(
    ranks: Ranks,
    device: torch.device,
    recorder: Recorder | None = None,
    inject: Inject | None = None,
) -> Exchange:
    """A new exchange of these ranks. Must be called on all of them."""
    kind = StagedExchange if ranks.through_host else CollectiveExchange
    return kind(ranks, device, recorder, inject)
