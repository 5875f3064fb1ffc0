"""Keeps as many experts at home on the compute device as its memory allows.

How much memory activations need is known only after a batch. So the first passes are observed, then
experts move to the device until the budget is used; before a larger batch, and when the allocator
runs short, some leave it again.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from overspill.core.errors import BudgetError
from overspill.core.sizes import format_size
from overspill.plan.homes import homes_within

_log = logging.getLogger("overspill")
_OBSERVED = 2  # passes before a change; the first of them is not measured
_MARGIN = 0.02  # share of the budget that stays free
_LARGEST_MARGIN = 0.16
_WORTHWHILE = 0.02  # share of the experts: moving fewer is not worth the wait


class DeviceMemory(Protocol):
    """The memory of the compute device, as far as this process uses it."""

    def peak(self) -> int:
        """The most that was reserved since `reset`."""

    def allocated(self) -> int:
        """What is in use now."""

    def shortages(self) -> int:
        """How often the allocator had to free cached memory so far, which stops the device."""

    def reset(self) -> None:
        """Starts a new measurement of the peak, without cached memory."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def shortages(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


class Residency:
    """Decides how many experts live on the device, before each pass through the model."""

    def __init__(
        self,
        memory: DeviceMemory,
        budget: int,
        total: int,
        expert_bytes: Callable[[], int],
        set_homes: Callable[[int], None],
    ) -> None:
        """`expert_bytes` is what an expert at home needs, `set_homes` moves experts."""
        self._memory = memory
        self._budget = budget
        self._total = total
        self._expert_bytes = expert_bytes
        self._set_homes = set_homes
        self._margin = _MARGIN
        self._passes = 0  # since experts were moved
        self._idle = 0  # bytes in use before a pass
        self._rows = 0  # the most tokens of a pass since experts were moved
        self._most_rows = 0  # ever
        self._per_row = 0.0  # bytes of activations for a token
        self._shortages = memory.shortages()
        memory.reset()

    def before_pass(self, rows: int, at_home: int) -> None:
        """A pass of `rows` tokens begins, between two steps: moves experts if that is worthwhile.
        Experts that cannot leave the device stay there."""
        if self._passes == 1:  # the first pass may have compiled kernels and allocated states
            self._memory.reset()
        elif self._passes > 1:
            self._per_row = max(self._per_row, (self._memory.peak() - self._idle) / self._rows)
        self._most_rows = max(self._most_rows, rows)
        shortages = self._memory.shortages()
        short, self._shortages = shortages > self._shortages and at_home > 0, shortages
        if short:
            self._margin = min(_LARGEST_MARGIN, 2 * self._margin)
        need = self._memory.allocated() + self._per_row * self._most_rows
        free = int(self._budget * (1 - self._margin) - need)
        homes = homes_within(free, at_home, self._expert_bytes(), self._total)
        least = max(1, int(_WORTHWHILE * self._total))
        more = homes >= at_home + least or homes == self._total
        fewer = homes < at_home and (short or self._most_rows > self._rows)
        if (homes > at_home and more and self._passes >= _OBSERVED) or fewer:
            self._move(at_home, homes)
        self._rows = rows if self._passes <= 1 else max(self._rows, rows)
        self._passes += 1
        self._idle = self._memory.allocated()

    def _move(self, at_home: int, homes: int) -> None:
        try:
            self._set_homes(homes)
        except (BudgetError, torch.OutOfMemoryError) as error:
            _log.warning("experts could not be moved to or from the GPU: %s", error)
            return
        size = format_size(abs(homes - at_home) * self._expert_bytes())
        verb = "moved to" if homes > at_home else "left"
        _log.info("%d experts (%s) %s the GPU", abs(homes - at_home), size, verb)
        self._memory.reset()
        self._passes = 0
