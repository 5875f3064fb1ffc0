"""The engine of experts that are all on the compute device."""

import torch

from overspill.core.expert_map import ExpertMap
from overspill.core.lifetime import Lifetime
from overspill.core.sizes import format_size
from overspill.hardware.machine import usable_cores
from overspill.moe.dispatch import LocalDispatcher
from overspill.moe.engine import Engine
from overspill.moe.resident.compute import ResidentCompute
from overspill.moe.resident.gradients import ResidentGradients
from overspill.moe.resident.memory import ResidentMemory
from overspill.moe.resident.records import ResidentRecords
from overspill.moe.settings import Settings
from overspill.moe.training_step import TrainingStep
from overspill.plan.budget import Placement
from overspill.tiers.layout import RecordLayout
from overspill.trace.recorder import Recorder


class ResidentEngine(Engine):
    def __init__(
        self,
        n_layers: int,
        experts: ExpertMap,
        layout: RecordLayout,
        device: torch.device,
        placement: Placement,
        settings: Settings,
        recorder: Recorder,
    ) -> None:
        self._memory = ResidentMemory(n_layers * experts.n_local, layout, device)
        records = ResidentRecords(n_layers, experts, self._memory)
        training: TrainingStep | None = None
        if placement.training:
            threads = settings.threads or usable_cores()
            sink = ResidentGradients(self._memory, experts.n_local, threads)
            training = TrainingStep(n_layers, sink, records)
        dispatcher = LocalDispatcher(experts, device)
        max_rows = settings.max_rows or placement.max_rows
        self._compute = ResidentCompute(
            n_layers, experts, self._memory, dispatcher, max_rows, settings.waves
        )
        super().__init__(self._compute, training, records, placement, settings, recorder)

    def switch(self, settings: Settings) -> None:
        self._check_switch(settings)
        self.flush()
        self._settings = settings
        self._compute.set_grouped(settings.waves)

    @property
    def lifetime(self) -> Lifetime:
        return self._memory.lifetime

    def flush(self) -> None:
        with self.exclusive():
            self._memory.wait()

    def check_conserved(self) -> None:
        self.flush()

    def bytes_by_tier(self) -> dict[str, int]:
        return {"gpu": self._memory.nbytes, "host": 0, "disk": 0}

    def describe(self) -> str:
        count = self.n_layers * self.experts.n_local
        size = format_size(self._memory.nbytes)
        return f"mode gpu: all {count} experts and their states on {self.device} ({size})"

    def _interrupt(self) -> None:
        """No pass waits."""

    def _close(self) -> None:
        self.flush()
        self._memory.close()
