"""The GPU memory of all models of this process. Torch counts it, and limits it, as a whole."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from overspill.core.errors import OverspillError
from overspill.moe.device_memory import CudaMemory, DeviceMemory, device_index

_log = logging.getLogger("overspill")


class MemoryUser(Protocol):
    """An engine, or a model that is being offloaded."""

    def device_bytes(self) -> int:
        """Bytes of its experts and its dense part on the device."""

    def shrink(self) -> None:
        """Another model gets memory: lets experts leave the device that are too many now."""


class _Claim:
    """A model that is being offloaded: it holds nothing that could be counted yet."""

    def device_bytes(self) -> int:
        return 0

    def shrink(self) -> None:
        """No expert of it can leave."""


class MemoryLimits:
    """The budgets of all models of this process. Models without one share the rest equally. Torch
    has one limit per device and process: the sum of the budgets of that device, so that a model can
    use its own beside the others."""

    def __init__(self) -> None:
        self._models: dict[MemoryUser, ModelMemory] = {}

    def set(
        self, user: MemoryUser, device: torch.device, budget: int | None, memory: DeviceMemory
    ) -> "ModelMemory":
        """A hard limit: the allocator fails rather than exceed the budgets. Without a budget the
        model shares `memory`. Returns the part of it that the model may use."""
        shared = budget is None
        most = memory.available() if budget is None else budget
        model = ModelMemory(self, user, device_index(device), most, shared, memory)
        self._models[user] = model
        self._apply(model.index)
        return model

    def lift(self, user: MemoryUser) -> None:
        """The engine was closed; no-op if it set no limit."""
        model = self._models.pop(user, None)
        if model is not None:
            self._apply(model.index)
            for other in self.on(model.index):
                other.skip()

    def on(self, index: int) -> "list[ModelMemory]":
        """The models on a device."""
        return [model for model in self._models.copy().values() if model.index == index]

    @contextmanager
    def claimed(self, device: torch.device, budget: int | None) -> Iterator[None]:
        """While a model is offloaded: the others make room for it at once. A claim within a claim
        is the same."""
        if device.type != "cuda" or self._has_claim(device_index(device)):
            yield
            return
        claim = _Claim()
        try:
            claimed = self.set(claim, device, budget, CudaMemory(device))
            for other in self.on(claimed.index):
                other.note()
                try:
                    other.user.shrink()
                except OverspillError as error:  # a model that has failed keeps what it has
                    _log.warning("experts of another model could not leave the GPU: %s", error)
            yield
        finally:
            self.lift(claim)

    def _has_claim(self, index: int) -> bool:
        return any(isinstance(model.user, _Claim) for model in self.on(index))

    @contextmanager
    def moving(self, user: MemoryUser) -> Iterator[None]:
        """While experts of a model move: their memory does not belong to the peak of another."""
        model = self._models.get(user)
        others = [] if model is None else [m for m in self.on(model.index) if m is not model]
        for other in others:
            other.note()
        try:
            yield
        finally:
            for other in others:
                other.skip()

    def share(self, device: torch.device) -> int:
        """Bytes for a model without a budget that is being offloaded."""
        claims = [m for m in self.on(device_index(device)) if isinstance(m.user, _Claim)]
        return claims[0].available() if claims else CudaMemory(device).available()

    def limit(self, index: int) -> int:
        """Bytes that all models of a device may use together."""
        models = self.on(index)
        given = sum(model.budget for model in models if not model.shared)
        return given + max((model.budget for model in models if model.shared), default=0)

    def _apply(self, index: int) -> None:
        total = torch.cuda.get_device_properties(index).total_memory
        # a model that is being offloaded may have been on the device as a whole
        free = not self.on(index) or self._has_claim(index)
        fraction = 1.0 if free else min(1.0, self.limit(index) / total)
        torch.cuda.set_per_process_memory_fraction(fraction, index)


class ModelMemory:
    """The memory of a device for one model: without that of the others. Memory that is not known to
    be another's, such as activations, counts for each model."""

    def __init__(
        self,
        limits: MemoryLimits,
        user: MemoryUser,
        index: int,
        budget: int,
        shared: bool,
        memory: DeviceMemory,
    ) -> None:
        """A model that is `shared` has no budget of its own, but shares the free memory."""
        self.user = user
        self.index = index
        self.budget = budget
        self.shared = shared
        self._limits = limits
        self._memory = memory
        self._noted = 0  # the peak until the others changed

    def _others(self) -> "list[ModelMemory]":
        return [model for model in self._limits.on(self.index) if model is not self]

    def held_by_others(self) -> int:
        return sum(other.user.device_bytes() for other in self._others())

    def available(self) -> int:
        most = min(self._memory.available(), self._limits.limit(self.index))
        left = most - self.held_by_others()
        if not self.shared:
            return left
        others = self._others()
        given = [m for m in others if not m.shared]
        most -= sum(max(m.budget, m.user.device_bytes()) for m in given)
        common = max(0, self.allocated() - self.user.device_bytes())  # of no model
        equal = max(0, most - common) // (1 + len(others) - len(given))
        return min(left, common + equal)

    def allocated(self) -> int:
        return self._memory.allocated() - self.held_by_others()

    def peak(self) -> int:
        self.note()
        peak, self._noted = self._noted, 0
        return peak

    def note(self) -> None:
        """Note the peak so far, before the memory of other models changes."""
        self._noted = max(self._noted, self._memory.peak() - self.held_by_others())

    def skip(self) -> None:
        """Leave memory that was reserved since `note` out of the peak."""
        self._memory.peak()

    def shortages(self) -> int:
        return self._memory.shortages()

    def reset(self) -> None:
        self._noted = 0
        self._memory.reset()


MEMORY_LIMITS = MemoryLimits()
