"""Figures of the memory of a compute device."""

from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """The memory of the compute device, as far as this process uses it."""

    def peak(self) -> int:
        """The most that was reserved since the last call, or since `reset`."""

    def allocated(self) -> int:
        """Bytes in use now."""

    def available(self) -> int:
        """Bytes that this process has reserved or that are free on the device."""

    def shortages(self) -> int:
        """Times that the allocator had to free cached memory so far, which stops the device."""

    def reset(self) -> None:
        """Start a new measurement of the peak, without cached memory."""


class CudaMemory:
    """Leaves torch's peak statistics to the user. Reserved memory grows until cached memory is
    freed: without that its peak is the memory reserved now, and at most the memory reserved before
    and since."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_index(device)
        self._reserved = self._reserved_so_far()

    def _reserved_so_far(self) -> tuple[int, int]:
        """Bytes that are reserved now, and all that ever were."""
        stats = torch.cuda.memory_stats(self._device)
        return (
            int(stats.get("reserved_bytes.all.current", 0)),
            int(stats.get("reserved_bytes.all.allocated", 0)),
        )

    def peak(self) -> int:
        before, counted = self._reserved
        self._reserved = now, total = self._reserved_so_far()
        # more than the limit is counted if cached memory was freed and reserved again
        return max(now, min(before + total - counted, self._limit()))

    def _limit(self) -> int:
        total = torch.cuda.get_device_properties(self._device).total_memory
        return int(torch.cuda.get_per_process_memory_fraction(self._device) * total)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def available(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)

    def shortages(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def reset(self) -> None:
        torch.cuda.empty_cache()
        self._reserved = self._reserved_so_far()


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
