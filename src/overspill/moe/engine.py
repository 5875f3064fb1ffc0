"""The engine of an offloaded model, `model.overspill`: three parts and their lifetime.

`compute` runs the experts, `training` follows a training step (None for inference), `records` reads
and writes weights and optimizer states.
"""

import abc
from typing import Any

import torch

from overspill.core.errors import ConfigError, OrderError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertShape
from overspill.moe.compute import ExpertCompute
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

    @abc.abstractmethod
    def check_open(self) -> None:
        """Raises if the engine was closed."""

    @abc.abstractmethod
    def check_conserved(self) -> None:
        """When idle: every slot and buffer is accounted for."""

    @abc.abstractmethod
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of the experts on the compute device, in host memory and on disk."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line: the mode and where everything is."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all threads and frees the memory; the experts are gone."""


def lift_memory_limit(device: torch.device) -> None:
    """The allocator's limit was the engine's budget."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)
