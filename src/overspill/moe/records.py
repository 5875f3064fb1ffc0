"""Access to the records of experts: weights and optimizer states, for loading and checkpoints."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertId
from overspill.moe.residents.memory import LayerRecords, Residents
from overspill.tiers.entry import Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.resident_changes import ResidentChanges
from overspill.tiers.store import ExpertStore
from overspill.transfer.requests import run_all


class ExpertRecords:
    """Reads and writes whole records by global expert id, wherever the expert is, while
    no step is running."""

    def __init__(self, store: ExpertStore, residents: Residents) -> None:
        self._store = store
        self._residents = residents
        self._changes = ResidentChanges(store)
        self._saved_to: Path | None = None
        self.n_changes = 0
        """How often weights of experts were written or updated; it is counted before updates, which
        may run in other threads, and after writing."""

    @property
    def layout(self) -> RecordLayout:
        return self._store.layout

    @property
    def packed(self) -> bool:
        """Whether the records hold codes and scales, which cannot be changed."""
        return self.layout.format is not None

    @property
    def weights_bytes(self) -> int:
        return len(self._store.entries) * self.layout.weight_bytes

    def ids(self) -> Iterator[ExpertId]:
        """All local experts, lowest layer first."""
        for layer in range(self._store.n_layers):
            for global_id in self._store.experts.local_ids:
                yield ExpertId(layer, global_id)

    @property
    def saved_to(self) -> Path | None:
        """The folder that holds the current weights, if one does."""
        return self._saved_to

    def mark_saved(self, folder: Path) -> None:
        """The current weights were written to `folder`."""
        self._saved_to = folder

    def mark_changed(self) -> None:
        """The weights differ from those in any folder, or will when an update has ended."""
        self._saved_to = None
        self.n_changes += 1

    def _resident(self, expert: ExpertId) -> tuple[LayerRecords, int] | None:
        """The records of the expert's layer and its row, if it is resident."""
        self._store.lifetime.check()
        position = self._store.maps[expert.layer].position(expert.index)
        if position < self._store.residents[expert.layer]:
            return self._residents[expert.layer], position
        return None

    def fill(
        self, fill: Callable[[ExpertId, Tensor], None], workers: int = 1, on_host: bool = False
    ) -> None:
        """Before the first use: lets `fill` write the stored weights of every expert in
        place, in `workers` threads. Experts on disk, and with `on_host` those on the device, are
        written through a host buffer."""
        own = threading.local()

        def fill_one(expert: ExpertId) -> None:
            place = self._resident(expert)
            if place is None:
                self._store.set_part(
                    self._store.entry(expert),
                    Part.WEIGHTS,
                    lambda memory: fill(expert, self.layout.weights(memory)),
                )
                return
            weights = place[0].weights[place[1]]
            if not on_host:
                fill(expert, weights)
                return
            if not hasattr(own, "record"):
                own.record = torch.empty(weights.shape, dtype=weights.dtype)
            fill(expert, own.record)
            weights.copy_(own.record)

        run_all(fill_one, self.ids(), workers)
        self._store.wait_allocated()

    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        """Copies an expert's flat weights into `out` [numel]."""
        place = self._resident(expert)
        if place is not None:
            self.layout.unpack(expert.layer, place[0].weights[place[1]], out)
        else:
            memory = self._store.read_part(self._store.entry(expert), Part.WEIGHTS)
            self.layout.unpack(expert.layer, self.layout.weights(memory), out)

    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        """Lets `fill` write an expert's flat weights [numel] in place; packed ones are refused."""
        if self.packed:
            raise ConfigError(
                "the experts of this model are packed, and cannot be changed; load the checkpoint "
                "without packed=True (--packed)"
            )
        if any(self.layout.ranks):
            raise ConfigError(
                "the experts of this model have an adapter beside their weights, and cannot be "
                "changed; merge it with overspill.merge, and load that"
            )
        try:
            self._write_weights(expert, fill)
        finally:  # also after a part of it
            self.n_changes += 1

    def _write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        place = self._resident(expert)
        self.mark_changed()
        # the master becomes the new weight, without low bits of the old one
        if place is not None:
            records, row = place
            fill(records.weights[row])
            if "low" in records.states:
                records.states["low"][row].zero_()
            return
        entry = self._store.entry(expert)
        self._store.write_part(entry, Part.WEIGHTS, lambda m: fill(self.layout.weights(m)))
        if self.layout.dtype == torch.bfloat16 and Part.STATES in self._store.memory.slabs:
            self._store.write_part(entry, Part.STATES, self._clear_low_bits)

    def _clear_low_bits(self, memory: Tensor) -> None:
        self.layout.state(memory, "low").zero_()

    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        """Copies one optimizer state of an expert into `out` [numel]."""
        place = self._resident(expert)
        if place is not None:
            out.copy_(place[0].states[name][place[1]])
        else:
            memory = self._store.read_part(self._store.entry(expert), Part.STATES)
            out.copy_(self.layout.state(memory, name))

    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        """Sets one optimizer state of an expert."""
        place = self._resident(expert)
        if place is not None:
            place[0].states[name][place[1]].copy_(value)
            return

        def fill(memory: Tensor) -> None:
            self.layout.state(memory, name).copy_(value)

        self._store.write_part(self._store.entry(expert), Part.STATES, fill)

    # -- a change of residents ----------------------------------------------------------------

    def move_to_device(self, layer: int, count: int) -> None:
        """Makes the first `count` experts of a layer resident. While nothing
        is computed or transferred, and no gradient is kept."""
        try:
            self._residents.resize(layer, count)
            for position in range(self._store.residents[layer], count):
                self._copy_to_device(layer, position)
            self._residents.wait()  # the host slots are given to others
            self._changes.leave_host(layer, count)
        except BaseException:
            self._residents.resize(layer, self._store.residents[layer])
            raise

    def _copy_to_device(self, layer: int, position: int) -> None:
        records, entry = self._residents[layer], self._store.at(layer, position)
        weights = self.layout.weights(self._store.read_part(entry, Part.WEIGHTS))
        records.weights[position].copy_(weights)
        if records.states:
            memory = self._store.read_part(entry, Part.STATES)
            for name, state in records.states.items():
                state[position].copy_(self.layout.state(memory, name))

    def move_to_host(self, layer: int, count: int) -> None:
        """Keeps only the first `count` experts of a layer resident. While nothing
        is computed or transferred, and no gradient is kept; host memory or the disk must have room
        for the others."""
        records = self._residents[layer]
        try:
            for position in reversed(range(count, self._store.residents[layer])):
                entry = self._store.at(layer, position)
                self._changes.enter_host(
                    entry, {part: self._copier(records, position, part) for part in self._parts()}
                )
        finally:
            self._residents.resize(layer, self._store.residents[layer])

    def swap(self, layer: int, resident: int, streamed: int) -> None:
        """Swaps a resident expert and a streamed one. While
        nothing is computed or transferred, and there are no optimizer states."""
        store, row = self._store, self._residents[layer].weights[resident]
        entries = store.at(layer, resident), store.at(layer, streamed)
        with store.lock:
            host = self.layout.weights(self._changes.load_weights(entries[1]))
            before, map_before = (row.clone(), host.to(row.device, copy=True)), store.maps[layer]
            try:
                self._changes.swap(*entries, lambda: _copy_pair(before[::-1], (row, host)))
            except BaseException:
                if store.maps[layer] is map_before:
                    _copy_pair(before, (row, host))
                raise

    def _parts(self) -> list[Part]:
        return [part for part in (Part.WEIGHTS, Part.STATES) if part in self._store.memory.slabs]

    def _copier(self, records: LayerRecords, row: int, part: Part) -> Callable[[Tensor], None]:
        def copy(memory: Tensor) -> None:
            if part == Part.WEIGHTS:
                self.layout.weights(memory).copy_(records.weights[row])
                return
            if not records.states:  # there were no optimizer states until now
                memory.zero_()
            for name, state in records.states.items():
                self.layout.state(memory, name).copy_(state[row])

        return copy


def _copy_pair(sources: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
