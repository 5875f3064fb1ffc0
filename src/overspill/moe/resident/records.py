"""Records of experts on the compute device."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId
from overspill.moe.records import ExpertRecords
from overspill.moe.resident.memory import ResidentMemory
from overspill.tiers.layout import RecordLayout
from overspill.transfer.requests import run_all


class ResidentRecords(ExpertRecords):
    def __init__(self, n_layers: int, experts: ExpertMap, memory: ResidentMemory) -> None:
        super().__init__(n_layers, experts)
        self._memory = memory

    @property
    def layout(self) -> RecordLayout:
        return self._memory.layout

    def _number(self, expert: ExpertId) -> int:
        self._memory.lifetime.check()
        return expert.layer * self.experts.n_local + self.experts.position(expert.index)

    def fill(
        self, fill: Callable[[ExpertId, Tensor], None], workers: int = 1, on_host: bool = False
    ) -> None:
        own = threading.local()

        def fill_one(expert: ExpertId) -> None:
            weights = self._memory.weights[self._number(expert)]
            if not on_host:
                fill(expert, weights)
                return
            if not hasattr(own, "record"):
                own.record = torch.empty(weights.shape, dtype=weights.dtype)
            fill(expert, own.record)
            weights.copy_(own.record)

        run_all(fill_one, self.ids(), workers)

    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        out.copy_(self._memory.weights[self._number(expert)])

    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        number = self._number(expert)
        self.mark_changed()
        fill(self._memory.weights[number])
        if "low" in self._memory.states:
            # the master is the new weight, without low bits of the old one
            self._memory.states["low"][number].zero_()

    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        number = self._number(expert)
        out.copy_(self._memory.states[name][number])

    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        number = self._number(expert)
        self._memory.states[name][number].copy_(value)
