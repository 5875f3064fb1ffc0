"""Pinned host memory as a device tensor."""

import functools
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import BudgetError, EngineError
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab


class _Interface:
    """Memory owned by another object, in the form that torch accepts."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # kept alive by the view
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
            "strides": None,
        }


def on_device(memory: Tensor, device: torch.device) -> Tensor:
    """Return a device tensor that refers to pinned bytes: kernels read and write them over the
    link. On a CPU it is the same tensor."""
    assert memory.dtype == torch.uint8
    assert memory.is_contiguous()
    if device.type != "cuda":
        return memory
    view = torch.as_tensor(_Interface(memory), device=device)
    if view.data_ptr() != memory.data_ptr():  # torch made a copy
        raise EngineError(f"{device} cannot access pinned memory; set cpu_experts=False")
    return view


@functools.cache
def can_map(device: torch.device) -> bool:
    """Whether `on_device` works. Torch treats pinned memory as memory of the first GPU."""
    try:
        slab = HostSlab("a test", 1, ALIGN, pinned=device.type == "cuda")
    except BudgetError:  # no memory can be pinned
        return False
    try:
        on_device(slab[0], device)
    except EngineError:
        return False
    finally:
        slab.close()
    return True
