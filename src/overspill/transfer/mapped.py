"""Pinned host memory as the device sees it."""

import functools
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import EngineError
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab


class _Interface:
    """What torch asks of memory that something else owns."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # as long as the view lives
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
            "strides": None,
        }


def on_device(memory: Tensor, device: torch.device) -> Tensor:
    """Pinned bytes as a tensor of the device: its kernels read and write them over the link. On a
    CPU they are what they are."""
    assert memory.dtype == torch.uint8
    assert memory.is_contiguous()
    if device.type != "cuda":
        return memory
    view = torch.as_tensor(_Interface(memory), device=device)
    if view.data_ptr() != memory.data_ptr():  # torch has made a copy, which nobody would read
        raise EngineError(f"pinned memory cannot be seen by {device}; set cpu_experts=False")
    return view


@functools.cache
def can_map(device: torch.device) -> bool:
    """Whether `on_device` works there; torch takes pinned memory for that of the first GPU."""
    slab = HostSlab("a look", 1, ALIGN, pinned=device.type == "cuda")
    try:
        on_device(slab[0], device)
    except EngineError:
        return False
    finally:
        slab.close()
    return True
