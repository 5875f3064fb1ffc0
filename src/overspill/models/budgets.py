"""Memory budgets of a model, and the options that override them."""

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from overspill.core.errors import BudgetError, ConfigError
from overspill.core.options import values_of
from overspill.core.sizes import format_size, parse_size
from overspill.hardware.machine import available_memory, choose_device, disk_free
from overspill.moe.memory_limit import MEMORY_LIMITS
from overspill.moe.settings import Settings
from overspill.plan.budget import BudgetRequest
from overspill.plan.limits import HostSlots, MemoryLimits, PlanOptions
from overspill.tiers.slab import Progress
from overspill.tiers.ssd import check_folder
from overspill.transfer.mapped import can_map

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_HOST_SHARE = 0.95
"""Share of the free host memory that is used without a budget; the system keeps the rest."""


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(PlanOptions, HostSlots, MemoryLimits):
    """Options of `overspill.offload`: budgets, and options that override them"""

    settings: Settings = field(default_factory=Settings)
    """Switches of the engine."""
    state_dtype: torch.dtype = torch.float32
    """Data type of the optimizer's moments."""
    mesh: "DeviceMesh | None" = None
    """Ranks among which the experts of each layer are divided, in training; a
    `torch.distributed.device_mesh.DeviceMesh` of one dimension, or of the dimensions
    ("data", "expert") for several nodes, which divide the experts in the same way, either one with
    "stage" before "expert". Each rank passes the same model and its own part of the batch; the loss
    is the mean over ranks. Those of a node share `host_memory` and `disk`; the other budgets are
    those of each rank."""
    shard_dense: bool = False
    """Whether the ranks of the mesh divide the dense weights, their gradients and optimizer states
    too, with FSDP2. Gathers each block's weights when it computes."""
    stages: int | None = None
    """How many pipeline stages `overspill.Stages` divides the model into; needed if the mesh has a
    dimension "stage", whose ranks then divide the layers (see docs/stages.md)."""

    progress: bool | Progress = True
    """Show a progress bar, or a function that is called with (what, done, total)."""
    quiet: bool = False
    """Do not print where the experts are."""


@dataclass(frozen=True, kw_only=True)
class Budgets(OffloadOptions):
    """Options of a model, and memory that is reserved for other uses."""

    host_reserved: int = 0
    """Bytes of host memory that each rank needs for other uses."""
    device_reserved: int = 0
    """Bytes of the budget of the compute device for modules that are added to the model later."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self.settings or Settings())  # None: the default
        if not isinstance(self.settings, Settings):
            raise ConfigError(
                f"settings={self.settings!r} is not Settings; give overspill.Settings(...)"
            )
        if self.shard_dense and "host" in (self.dense_states, self.dense_weights):
            raise ConfigError(
                "--shard-dense keeps dense parameters and their states on the GPUs; drop it, or "
                'dense_weights="host" and dense_states="host"'
            )
        for size, flag in ((self.gpu_memory, "--gpu-memory"), (self.host_memory, "--host-memory")):
            if size is not None:
                parse_size(size, flag)

    def with_gpu_memory(self, size: int) -> "Budgets":
        return dataclasses.replace(self, gpu_memory=size)

    @property
    def compute_device(self) -> torch.device:
        given = self.device
        if given is None and self.mesh is not None:
            given = self.mesh.device_type
        return choose_device(given)

    @property
    def _shares_gpu(self) -> bool:
        """Whether ranks exchange rows through the CPU because they are on one GPU."""
        return self.mesh is not None and self.mesh.device_type == "cpu"

    @property
    def folder(self) -> Path | None:
        return None if self.disk is None else Path(self.disk).expanduser()

    def claimed(self, device: torch.device) -> AbstractContextManager[None]:
        """Context in which the model is loaded and offloaded: other models on the GPU make room for
        it."""
        size = self.gpu_memory
        asked = None if size is None else parse_size(size, "--gpu-memory")
        return MEMORY_LIMITS.claimed(device, asked)

    def request(self, device: torch.device, n_ranks: int = 1) -> BudgetRequest:
        """Return the budgets in bytes for the planner; budgets that are not given come from the
        machine. Ranks share host memory and disk; each has a GPU of its own."""
        if self.folder is not None:
            check_folder(self.folder, need=0)  # even if the disk turns out not to be needed
        if n_ranks > 1 and device.type == "cuda" and self._shares_gpu and self.gpu_memory is None:
            raise BudgetError(
                f"{n_ranks} ranks share {device}; give the part of each with --gpu-memory"
            )
        available, states, weights = available_memory(), self.dense_states, self.dense_weights
        if self.shard_dense:
            weights = states = "gpu"
        if device.type == "cpu":  # all memory is host memory: nothing is gained
            weights = "gpu" if weights == "auto" else weights
            states = "gpu" if (states, weights) == ("auto", "gpu") else states
        gpu_memory = self._rank_gpu_bytes(device, available // n_ranks)
        host_memory = self._rank_host_bytes(available, n_ranks)
        return BudgetRequest(
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            gpu_text=_written(self.gpu_memory, gpu_memory),
            host_text=_written(self.host_memory, host_memory),
            disk_free=None if self.folder is None else disk_free(self.folder) // n_ranks,
            **{
                **values_of(self, PlanOptions),
                "dense_states": states,
                "dense_weights": weights,
            },
            host_slots=self.host_slots,
            residency=self.settings.residency and device.type == "cuda",
            can_map=can_map(device),
        )

    def _rank_gpu_bytes(self, device: torch.device, available: int) -> int:
        each = self._gpu_bytes(device, available)
        if each <= self.device_reserved:
            raise BudgetError(
                f"adapters of experts, their gradients and optimizer states need "
                f"{format_size(self.device_reserved)}, and --gpu-memory is {format_size(each)}; "
                "raise it, or give a lower rank"
            )
        return each - self.device_reserved

    def _rank_host_bytes(self, available: int, n_ranks: int) -> int:
        each = self._host_bytes(available) // n_ranks
        if each <= self.host_reserved:
            raise BudgetError(
                f"activations that wait in host memory need {format_size(self.host_reserved)}, and "
                f"--host-memory is {format_size(each)} for each process; raise it, or give fewer "
                "or smaller micro-batches"
            )
        return each - self.host_reserved

    def _host_bytes(self, available: int) -> int:
        if self.host_memory is None:
            return int(available * _HOST_SHARE)
        asked = parse_size(self.host_memory, "--host-memory")
        if asked > available:
            raise BudgetError(
                f"--host-memory {_written(self.host_memory, asked)} exceeds the "
                f"{format_size(available)} that this machine has available; lower it or give a "
                "--disk folder"
            )
        return asked

    def _gpu_bytes(self, device: torch.device, available: int) -> int:
        asked = None if self.gpu_memory is None else parse_size(self.gpu_memory, "--gpu-memory")
        if device.type != "cuda":
            return asked or available // 2  # the CPU computes: half of its memory is the device's
        total = torch.cuda.get_device_properties(device).total_memory
        if asked is None:
            return MEMORY_LIMITS.share(device)
        if asked > total:
            raise BudgetError(
                f"--gpu-memory {_written(self.gpu_memory, asked)} exceeds the GPU's "
                f"{format_size(total)}"
            )
        return asked


def _written(given: str | int | None, size: int) -> str:
    """Return a size as the user has written it, or with a unit if they gave a number or nothing."""
    is_text = isinstance(given, str) and not given.strip().isdigit()
    return str(given).strip() if is_text and parse_size(str(given)) == size else format_size(size)
