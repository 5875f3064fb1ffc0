"""Access to the records of experts: weights and optimizer states, for loading and checkpoints."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertId
from overspill.moe.residents.memory import LayerRecords, Residents
from overspill.tiers.entry import Entry, Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.resident_changes import ResidentChanges
from overspill.tiers.store import ExpertStore
from overspill.transfer.requests import run_all


class ExpertRecords:
    """Access to whole records by global expert id, on the device, in host memory and on disk, while
    no step is running."""

    def __init__(self, store: ExpertStore, residents: Residents) -> None:
        self._store = store
        self._places = store.places
        self._residents = residents
        self._changes = ResidentChanges(store)
        self.saved_to: Path | None = None
        """Folder that holds the current weights, if one does."""
        self.n_changes = 0
        """Number of times that weights of experts were written or updated; counted before updates,
        which may run in other threads, and after writing."""

    @property
    def layout(self) -> RecordLayout:
        return self._store.memory.layout

    @property
    def packed(self) -> bool:
        """Whether the records hold codes and scales, which cannot be changed."""
        return self.layout.format is not None

    @property
    def weights_bytes(self) -> int:
        return self._places.experts.n_local * sum(self._store.weight_bytes)

    def ids(self) -> Iterator[ExpertId]:
        """All local experts, lowest layer first."""
        for layer in range(self._places.n_layers):
            for global_id in self._places.experts.local_ids:
                yield ExpertId(layer, global_id)

    def mark_saved(self, folder: Path) -> None:
        """Note that the current weights were written to `folder`."""
        self.saved_to = folder

    def mark_changed(self) -> None:
        """Note that the weights differ from those in any folder, or will after an update."""
        self.saved_to = None
        self.n_changes += 1

    def _record(self, expert: ExpertId) -> "_DeviceRecord | _HostRecord":
        """The record of an expert where it is now. The only place that asks whether an expert is
        resident."""
        self._store.lifetime.check()
        position = self._places.maps[expert.layer].position(expert.index)
        if position < self._places.residents[expert.layer]:
            return _DeviceRecord(self._residents[expert.layer], position)
        return _HostRecord(self._store, self._places.entry(expert))

    def fill(
        self, fill: Callable[[ExpertId, Tensor], None], workers: int = 1, on_host: bool = False
    ) -> None:
        """Before the first use: lets `fill` write the stored weights of every expert in place, in
        `workers` threads. Experts on disk, and with `on_host` those on the device, are written
        through a host buffer."""
        buffers = threading.local() if on_host else None

        def fill_one(expert: ExpertId) -> None:
            self._record(expert).fill(partial(fill, expert), buffers)

        run_all(fill_one, self.ids(), workers)
        self._store.wait_allocated()

    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        """Copies an expert's flat weights into `out` [numel]."""
        self.layout.unpack(expert.layer, self._record(expert).weights(), out)

    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        """Lets `fill` write an expert's flat weights [numel] in place; packed ones are refused."""
        if self.packed:
            raise ConfigError(
                "the experts of this model are packed, and cannot be changed; load the checkpoint "
                "with packed=False, or without quantize="
            )
        if any(self.layout.ranks):
            raise ConfigError(
                "the experts of this model have an adapter beside their weights, and cannot be "
                "changed; merge it with overspill.merge, and load that"
            )
        record = self._record(expert)
        self.mark_changed()
        try:
            record.write_weights(fill)
        finally:  # also after a part of it
            self.n_changes += 1

    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        """Copies one optimizer state of an expert into `out` [numel]."""
        out.copy_(self._record(expert).state(name))

    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        """Sets one optimizer state of an expert."""
        self._record(expert).write_state(name, value)

    # -- a change of residents ----------------------------------------------------------------

    def move_to_device(self, layer: int, count: int) -> None:
        """Makes the first `count` experts of a layer resident. While nothing is computed or
        transferred, and no gradient is kept."""
        try:
            self._residents.resize(layer, count)
            for position in range(self._places.residents[layer], count):
                self._copy_to_device(layer, position)
            self._residents.wait()  # the host slots are given to others
            self._changes.leave_host(layer, count)
        except BaseException:
            self._residents.resize(layer, self._places.residents[layer])
            raise

    def _copy_to_device(self, layer: int, position: int) -> None:
        records, entry = self._residents[layer], self._places.at(layer, position)
        weights = self.layout.weights(self._store.read_part(entry, Part.WEIGHTS), layer)
        records.weights[position].copy_(weights)
        if records.states:
            memory = self._store.read_part(entry, Part.STATES)
            for name, state in records.states.items():
                state[position].copy_(self.layout.state(memory, name))

    def move_to_host(self, layer: int, count: int) -> None:
        """Keeps only the first `count` experts of a layer resident. While nothing is computed or
        transferred, and no gradient is kept; host memory or the disk must have room for the
        others."""
        records = self._residents[layer]
        try:
            for position in reversed(range(count, self._places.residents[layer])):
                parts = {Part.WEIGHTS, Part.STATES} & self._store.memory.slabs.keys()
                row = layer, position
                fills = {part: self._copier(records, *row, part) for part in sorted(parts)}
                self._changes.enter_host(self._places.at(layer, position), fills)
        finally:
            self._residents.resize(layer, self._places.residents[layer])

    def swap(self, layer: int, resident: int, streamed: int) -> None:
        """Swaps a resident expert and a streamed one. While nothing is computed or transferred, and
        there are no optimizer states."""
        store, row = self._store, self._residents[layer].weights[resident]
        entries = self._places.at(layer, resident), self._places.at(layer, streamed)
        with store.sync.lock:
            host = self.layout.weights(self._changes.load_weights(entries[1]), layer)
            before, map_before = (
                (row.clone(), host.to(row.device, copy=True)),
                self._places.maps[layer],
            )
            try:
                self._changes.swap(*entries, lambda: _copy_pair(before[::-1], (row, host)))
            except BaseException:
                if self._places.maps[layer] is map_before:
                    _copy_pair(before, (row, host))
                raise

    def _copier(
        self, records: LayerRecords, layer: int, row: int, part: Part
    ) -> Callable[[Tensor], None]:
        def copy(memory: Tensor) -> None:
            if part == Part.WEIGHTS:
                self.layout.weights(memory, layer).copy_(records.weights[row])
                return
            if not records.states:  # there were no optimizer states until now
                memory.zero_()
            for name, state in records.states.items():
                self.layout.state(memory, name).copy_(state[row])

        return copy


class _DeviceRecord(NamedTuple):
    """Record of a resident expert: a row of its layer's tensors on the compute device."""

    layer: LayerRecords
    row: int

    def weights(self) -> Tensor:
        return self.layer.weights[self.row]

    def fill(self, fill: Callable[[Tensor], None], buffers: threading.local | None) -> None:
        """Lets `fill` write the weights for the first time, through a host buffer of this thread if
        there are `buffers`."""
        if buffers is None:
            fill(self.weights())
            return
        if len(getattr(buffers, "record", ())) != len(self.weights()):  # of the size of this layer
            buffers.record = torch.empty(self.weights().shape, dtype=self.layer.weights.dtype)
        fill(buffers.record)
        self.weights().copy_(buffers.record)

    def write_weights(self, fill: Callable[[Tensor], None]) -> None:
        """Lets `fill` write the weights, and clears the low bits of the old master."""
        fill(self.weights())
        if "low" in self.layer.states:
            self.state("low").zero_()

    def state(self, name: str) -> Tensor:
        return self.layer.states[name][self.row]

    def write_state(self, name: str, value: Tensor) -> None:
        self.state(name).copy_(value)


class _HostRecord(NamedTuple):
    """Record of an expert in host memory or on disk; methods as of `_DeviceRecord`."""

    store: ExpertStore
    entry: Entry

    def weights(self) -> Tensor:
        memory = self.store.read_part(self.entry, Part.WEIGHTS)
        return self.store.memory.layout.weights(memory, self.entry.id.layer)

    def fill(self, fill: Callable[[Tensor], None], _: threading.local | None) -> None:
        weights, layer = self.store.memory.layout.weights, self.entry.id.layer
        self.store.set_part(self.entry, Part.WEIGHTS, lambda memory: fill(weights(memory, layer)))

    def write_weights(self, fill: Callable[[Tensor], None]) -> None:
        store, layout = self.store, self.store.memory.layout
        store.write_part(self.entry, Part.WEIGHTS, lambda memory: fill(layout.weights(memory)))
        if layout.dtype == torch.bfloat16 and Part.STATES in store.memory.slabs:
            self.write_state("low", torch.zeros((), dtype=torch.int16))

    def state(self, name: str) -> Tensor:
        return self.store.memory.layout.state(self.store.read_part(self.entry, Part.STATES), name)

    def write_state(self, name: str, value: Tensor) -> None:
        def fill(memory: Tensor) -> None:
            self.store.memory.layout.state(memory, name).copy_(value)

        self.store.write_part(self.entry, Part.STATES, fill)


def _copy_pair(sources: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
