"""The engine of an offloaded model, `model.overspill`: three parts and their lifetime.

`compute` runs the experts, `training` follows a training step (None for inference), `records` reads
and writes weights and optimizer states.
"""

import abc
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from overspill.core.errors import ConfigError, OrderError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertShape
from overspill.core.lifetime import Lifetime
from overspill.moe.compute import ExpertCompute
from overspill.moe.memory_limit import MEMORY_LIMITS
from overspill.moe.records import ExpertRecords
from overspill.moe.settings import Settings
from overspill.moe.training_step import TrainingStep
from overspill.plan.budget import Placement
from overspill.tiers.layout import RecordLayout
from overspill.trace.recorder import Recorder


class Engine(abc.ABC):
    """What a model holds. `resident` and `streaming` build one for their kind of memory."""

    def __init__(
        self,
        compute: ExpertCompute,
        training: TrainingStep | None,
        records: ExpertRecords,
        placement: Placement,
        settings: Settings,
        recorder: Recorder,
    ) -> None:
        self.compute = compute
        self.records = records
        self.placement = placement
        self.recorder = recorder
        self._training = training
        self._settings = settings
        self._lock = threading.RLock() if training is None else training.lock

    @property
    @abc.abstractmethod
    def lifetime(self) -> Lifetime: ...

    def exclusive(self) -> AbstractContextManager[object]:
        """The lock of the thread that runs a layer's pass, a step or `flush`: they share slots,
        gradients and the step cursor. Passes of several threads may come in any order."""
        self.check_open()  # first: in a forked child no thread would release the lock
        return self._lock

    @property
    def device(self) -> torch.device:
        return self.compute.device

    @property
    def layout(self) -> RecordLayout:
        return self.records.layout

    @property
    def shape(self) -> ExpertShape:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def n_layers(self) -> int:
        return self.compute.n_layers

    @property
    def experts(self) -> ExpertMap:
        return self.compute.experts

    @property
    def n_experts(self) -> int:
        """Experts of a layer over all processes."""
        return self.experts.n_global

    @property
    def expert_parameters(self) -> int:
        return self.n_layers * self.n_experts * self.shape.numel

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def overlap_updates(self) -> bool:
        return self._settings.overlap_updates

    @property
    def can_train(self) -> bool:
        return self._training is not None

    @property
    def training(self) -> TrainingStep:
        self.lifetime.check_process()
        if self._training is None:
            raise OrderError(
                "the model was offloaded for inference; call model.train() before offload() (a "
                "model of from_pretrained() is in evaluation mode) to plan memory for an optimizer"
            )
        return self._training

    @abc.abstractmethod
    def switch(self, settings: Settings) -> None:
        """Turns techniques on or off between steps, to measure what each gains."""

    def _check_switch(self, settings: Settings) -> None:
        for name in ("max_rows", "threads", "inject", "cpu_policy"):
            if getattr(settings, name) != getattr(self._settings, name):
                raise ConfigError(f"{name} cannot be switched; set it when the model is offloaded")

    @abc.abstractmethod
    def flush(self) -> None:
        """Waits until every transfer and update has ended."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise OrderError(
            "the engine of an offloaded model can be neither pickled nor copied; save "
            "model.state_dict(), or call overspill.save(model, folder)"
        )

    def check_open(self) -> None:
        """Raises if the engine was closed, or is another process's."""
        self.lifetime.check()

    @abc.abstractmethod
    def check_conserved(self) -> None:
        """When idle: every slot and buffer is accounted for."""

    @abc.abstractmethod
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of the experts on the compute device, in host memory and on disk."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line: the mode and where everything is."""

    def limit_memory(self, budget: int) -> None:
        """Limits what torch allocates on the device to the budgets of all engines."""
        MEMORY_LIMITS.set(self, self.device, budget)

    def close(self) -> None:
        """Ends all threads and frees the memory; the experts are gone. A pass in another thread
        ends first, with an error where it waits. No-op in a forked child."""
        if self.lifetime.forked:
            return
        self._interrupt()
        with self._lock:
            if not self.lifetime.closed:
                self._close()
                MEMORY_LIMITS.lift(self)

    @abc.abstractmethod
    def _interrupt(self) -> None:
        """Makes a pass of another thread raise where it waits."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Ends all threads and frees the memory, once."""
