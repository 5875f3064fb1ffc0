"""The memory of an offloaded model: its bytes in each tier, its limit on the GPU, and the line that
describes it."""

from contextlib import AbstractContextManager

import torch

from overspill.core.sizes import format_size
from overspill.moe.dense_part import DensePart
from overspill.moe.device_memory import CudaMemory, DeviceMemory
from overspill.moe.expert_moves import ExpertMoves
from overspill.moe.memory_limit import MEMORY_LIMITS, ModelMemory
from overspill.moe.model_part import ModelPart
from overspill.moe.pooled_experts import PooledExperts
from overspill.moe.residents.memory import Residents
from overspill.moe.row_placer import Balance
from overspill.plan.budget import Placement
from overspill.plan.residents import DeviceShare
from overspill.tiers.store import ExpertStore


class EngineMemory:
    """Counts and limits the memory of one model, and is its `MemoryUser` among the models that
    share the device."""

    def __init__(
        self,
        part: ModelPart,
        store: ExpertStore,
        residents: Residents,
        compute: PooledExperts,
        dense: DensePart,
        moves: ExpertMoves,
        placement: Placement,
        lock: AbstractContextManager[object],
    ) -> None:
        """`lock` is that of the engine."""
        self._part = part
        self._store = store
        self._places = store.places
        self._residents = residents
        self._compute = compute
        self._dense = dense
        self._moves = moves
        self._placement = placement
        self._lock = lock
        self._gpu: ModelMemory | None = None  # None without a GPU, and before `limit`

    # -- what is used -------------------------------------------------------------------------

    @property
    def _slot_bytes(self) -> int:
        """Memory of the device for slots and gradients of streamed experts."""
        return 0 if self._compute.streaming is None else self._compute.streaming.device_bytes

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of the experts on the compute device, in host memory and on disk; in host memory
        with those of the dense part, and of gradients for other ranks."""
        shared = self._part.shared
        outbox = 0 if shared is None else shared.own.sizes.outbox
        return {
            "gpu": self._residents.nbytes + self._slot_bytes,
            "host": self._moves.host_bytes + self._dense.host_bytes + outbox,
            "disk": self._store.memory.disk_bytes,
        }

    def budget_by_tier(self) -> dict[str, int | None]:
        """Bytes that this model may use of each tier; None for the disk if it uses none."""
        device = self._placement.gpu_memory if self._gpu is None else self._gpu.budget
        disk = self._store.memory.disk_budget()
        return {"gpu": device, "host": self._placement.host_memory, "disk": disk}

    def reserved_bytes(self) -> int | None:
        """Bytes that this process has reserved on the GPU for this model; None without a GPU."""
        if self._gpu is None:
            return None
        return torch.cuda.memory_reserved(self._residents.device) - self._gpu.held_by_others()

    def device_bytes(self) -> int:
        """Bytes of this model on the compute device between two passes."""
        return self.bytes_by_tier()["gpu"] + self._dense.device_bytes()

    def gpu_use(self) -> dict[str, int] | None:
        """Bytes of the GPU's budget and of the memory that this process has reserved, divided into
        resident experts, slots and gradients of streamed ones, and the rest (dense part,
        activations). None without a GPU."""
        reserved = self.reserved_bytes()
        if self._gpu is None or reserved is None:
            return None
        experts, slots = self._residents.nbytes, self._slot_bytes
        return {
            "budget": min(self._gpu.budget, self._gpu.available()),
            "reserved": reserved,
            "experts": experts,
            "slots": slots,
            "rest": reserved - experts - slots,
        }

    def free_bytes(self) -> int:
        """Bytes of the GPU's budget that are not allocated; 0 without a GPU."""
        if self._gpu is None:
            return 0
        return min(self._gpu.budget, self._gpu.available()) - self._gpu.allocated()

    @property
    def uses_disk(self) -> bool:
        return self._places.disk_slots > 0

    @property
    def cache_slots(self) -> int:
        """Host slots that experts on disk share."""
        with self._store.sync.lock:  # none is on its way to another expert
            return self._places.cache_slots

    @property
    def share(self) -> DeviceShare:
        """Resident experts, and gradients there."""
        return self._moves.share

    # -- its limit on the GPU -----------------------------------------------------------------

    def limit(self, budget: int | None) -> None:
        """Limit the memory that torch allocates on the GPU to the budgets of all models; without
        one, the model shares the free memory. No-op without a GPU."""
        device = self._residents.device
        if device.type != "cuda":
            return
        self._gpu = MEMORY_LIMITS.set(self, device, budget, CudaMemory(device))
        if self._placement.fills:
            self.fill(self._gpu, self._gpu.budget)

    def fill(self, memory: DeviceMemory, budget: int) -> None:
        """Let as many experts live on the device as `budget` allows, from now on."""
        self._moves.fill_memory(memory, budget, self)

    def shrink(self) -> None:
        """Move experts that are too many away from the device, for another model, if not in the
        middle of a step."""
        lifetime = self._store.lifetime
        if lifetime.forked or not self._moves.fills_memory:
            return
        with self._lock:
            if not lifetime.closed:
                self._moves.shrink()

    def hold_residents(self, holder: object) -> None:
        """Keep experts from moving by themselves as long as `holder` lives, or until it releases
        them: its copies of experts use the memory."""
        self._moves.holders.add(holder)

    def release_residents(self, holder: object) -> None:
        self._moves.holders.discard(holder)

    def close(self) -> None:
        """Give this model's budget to the others, after the engine was closed."""
        MEMORY_LIMITS.lift(self)

    # -- in words -----------------------------------------------------------------------------

    def describe(self, balance: Balance | None) -> str:
        """One line: the mode, and the place of everything."""
        placement, store, resident = self._placement, self._store, sum(self._places.residents)
        sizes = {tier: format_size(size) for tier, size in self.bytes_by_tier().items()}
        ranks = self._part.ranks
        rank = "" if ranks is None else f"rank {ranks.rank} of {ranks.size}, "
        device = self._residents.device
        if self._compute.streaming is None:
            mode = "mode gpu: " if device.type == "cuda" else ""
            return (
                f"{rank}{mode}all {resident} experts"
                f"{' and their states' if placement.trains_experts else ''} on {device} "
                f"({sizes['gpu']}){self._describe_dense()}"
            )
        residents = f"{resident} experts and " if resident else ""
        least, most = format_size(min(store.weight_bytes)), format_size(max(store.weight_bytes))
        line = (
            f"{rank}mode {placement.mode}: {len(self._places.entries)} experts of "
            f"{least if least == most else f'{least} to {most}'}; {residents}{placement.slots} "
            f"slots on {device} ({sizes['gpu']}), {self._places.in_host} in host memory "
            f"({format_size(self._moves.host_bytes)})"
        )
        if self._places.on_disk:
            slots = f"{self._places.cache_slots} host slots"
            line += f", {self._places.on_disk} on disk ({sizes['disk']}) through {slots}"
        if self._part.shared is not None:
            line += f", those of all {self._places.experts.n_global} of a layer shared by ranks"
        if balance is not None:
            line += f"; {balance}"
        return line + self._describe_dense()

    def _describe_dense(self) -> str:
        placement = self._placement
        weights = "weights and gradients" if placement.training else "weights"
        parts = (placement.dense_weights, weights), (placement.dense_states, "optimizer states")
        return "".join(
            f"; dense {what} in host memory ({format_size(size)})" for size, what in parts if size
        )
