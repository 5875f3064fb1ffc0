"""The options of memory and placement, of the Python interface, flags and the planner alike.
Imports no torch."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from overspill.core.options import Count, Device, Size


@dataclass(frozen=True, kw_only=True)
class HostSlots:
    """Host memory in front of the disk"""

    host_slots: Count | None = None
    """Number of experts kept in host memory in front of the disk; overrides the host memory."""


@dataclass(frozen=True)
class MemoryLimits:
    """Memory"""

    gpu_memory: Size | None = None
    """GPU memory to use, such as 8GiB; default: all that is free, or an equal share of it if
    several models have no budget."""
    host_memory: Size | None = None
    """Host memory to use, such as 96GiB; default: 95% of the free memory."""
    disk: str | Path | None = None
    """Folder on an SSD for experts that do not fit in host memory; default: no disk is used."""
    _: KW_ONLY
    device: Device | None = None
    """cuda or cpu; default: the GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Placement of experts"""

    mode: Annotated[str, ("auto", "gpu", "host", "disk")] = "auto"
    """Where experts are kept: auto (from the budgets), gpu, host or disk."""
    slots: Count | None = None
    """Number of experts that fit on the compute device; overrides its memory."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlacementOptions):
    """Placement of experts and of the dense part"""

    gpu_experts: int | None = None
    """Experts that live on the compute device with their optimizer states, so that nothing of them
    is transferred; default: all if they fit, else none."""
    keep_gradients: bool | None = None
    """Whether to plan memory for gradients that are kept for clipping or accumulation; default:
    only if a disk folder is given."""
    dense_states: Annotated[str, ("auto", "gpu", "host")] = "auto"
    """Where the optimizer states of the dense part (attention, embeddings, head) are: "gpu", "host"
    (pinned memory that the GPU reads and writes over PCIe), or "auto" (on the host if the GPU
    budget is small for them)."""
    dense_weights: Annotated[str, ("auto", "gpu", "host")] = "auto"
    """Where its weights and gradients are: "gpu", "host" (copied to the GPU block by block), or
    "auto" (on the host if the GPU budget does not hold them). On the host, so are the optimizer
    states."""
