"""Records of experts in host memory and on disk."""

from collections.abc import Callable

import torch
from torch import Tensor

from overspill.core.experts import ExpertId
from overspill.moe.records import ExpertRecords
from overspill.tiers.entry import Entry, Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.store import ExpertStore
from overspill.transfer.requests import run_all


class StreamingRecords(ExpertRecords):
    def __init__(self, store: ExpertStore) -> None:
        super().__init__(store.n_layers, store.experts)
        self._store = store

    @property
    def layout(self) -> RecordLayout:
        return self._store.layout

    def _entry(self, expert: ExpertId) -> Entry:
        self._store.lifetime.check()
        return self._store.entry(expert)

    def fill(
        self, fill: Callable[[ExpertId, Tensor], None], workers: int = 1, on_host: bool = False
    ) -> None:
        def fill_one(entry: Entry) -> None:
            self._store.set_part(
                entry, Part.WEIGHTS, lambda memory: fill(entry.id, self.layout.weights(memory))
            )

        run_all(fill_one, self._store.entries, workers)
        self._store.wait_allocated()

    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        memory = self._store.read_part(self._entry(expert), Part.WEIGHTS)
        out.copy_(self.layout.weights(memory))

    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        entry = self._entry(expert)
        self.mark_changed()
        self._store.write_part(entry, Part.WEIGHTS, lambda m: fill(self.layout.weights(m)))
        if self.layout.dtype == torch.bfloat16 and Part.STATES in self._store.slabs:
            # the master is the new weight, without low bits of the old one
            self._store.write_part(entry, Part.STATES, self._clear_low_bits)

    def _clear_low_bits(self, memory: Tensor) -> None:
        self.layout.state(memory, "low").zero_()

    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        memory = self._store.read_part(self._entry(expert), Part.STATES)
        out.copy_(self.layout.state(memory, name))

    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        def fill(memory: Tensor) -> None:
            self.layout.state(memory, name).copy_(value)

        self._store.write_part(self._entry(expert), Part.STATES, fill)
