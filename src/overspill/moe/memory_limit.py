"""The limit of torch's GPU memory, which holds for the whole process."""

import torch


class MemoryLimits:
    """The budgets of all open engines. Torch has one limit per device and process: the sum of the
    budgets of that device, so that an engine can use its own beside the others."""

    def __init__(self) -> None:
        self._budgets: dict[object, tuple[int, int]] = {}  # engine: device index, bytes

    def set(self, engine: object, device: torch.device, budget: int) -> None:
        """A hard limit: the allocator fails rather than exceed the budgets."""
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._budgets[engine] = index, budget
            self._apply(index)

    def alone(self, engine: object) -> bool:
        """Whether no other engine has set a limit for the same device. Torch counts the memory of
        the process, not that of an engine."""
        index, _ = self._budgets.get(engine, (None, 0))
        return sum(device == index for device, _ in self._budgets.values()) <= 1

    def lift(self, engine: object) -> None:
        """The engine was closed; no-op if it set no limit."""
        index, _ = self._budgets.pop(engine, (None, 0))
        if index is not None:
            self._apply(index)

    def _apply(self, index: int) -> None:
        budgets = [size for device, size in self._budgets.values() if device == index]
        total = torch.cuda.get_device_properties(index).total_memory
        fraction = min(1.0, sum(budgets) / total) if budgets else 1.0
        torch.cuda.set_per_process_memory_fraction(fraction, index)


MEMORY_LIMITS = MemoryLimits()
