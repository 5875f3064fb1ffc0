"""The memory of the experts' parts: host slots and records on disk. Which expert has them is known
to the store alone."""

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.hardware.machine import disk_free
from overspill.tiers.entry import Part
from overspill.tiers.layout import ALIGN, RecordLayout
from overspill.tiers.slab import HostSlab, Progress
from overspill.tiers.ssd import RecordFile, check_folder


class SmallSlots(NamedTuple):
    """Bytes of the slots that are smaller than the largest weight record, by their numbers."""

    host: dict[int, int]
    disk: dict[int, int]


NO_SMALL_SLOTS = SmallSlots({}, {})


class RecordMemory:
    """Each part has a slab of host slots and, in the folder `disk`, a file of records."""

    def __init__(
        self,
        layout: RecordLayout,
        disk_slots: int,
        pinned: bool,
        disk: Path | None,
        progress: Progress | None,
        weights: Tensor | None = None,
        small: SmallSlots = NO_SMALL_SLOTS,
    ) -> None:
        """`weights` is memory for the host slots of weights, if it exists already."""
        assert disk is not None or not disk_slots
        self.layout = layout
        self.pinned = pinned
        self.slabs: dict[Part, HostSlab] = {}
        self.files: dict[Part, RecordFile] = {}
        self._disk_slots = disk_slots
        self._folder = disk if disk_slots else None
        self._progress = progress
        self._weights = weights
        self._small = small
        if self._folder is not None:
            check_folder(self._folder, sum(self._slot_sizes(Part.WEIGHTS, disk_slots, small.disk)))

    def size(self, part: Part) -> int:
        """Bytes of `part` of one expert; of the largest, if their sizes differ by layer."""
        return self.layout.state_bytes if part == Part.STATES else self.layout.weight_bytes

    def size_in(self, part: Part, layer: int) -> int:
        """Bytes of `part` of an expert of a layer."""
        return self.layout.weight_bytes_in(layer) if part == Part.WEIGHTS else self.size(part)

    def _slot_sizes(self, part: Part, count: int, small: Mapping[int, int]) -> list[int]:
        size = self.size(part)
        if part != Part.WEIGHTS:
            return [size] * count
        return [small.get(slot, size) for slot in range(count)]

    def set_state_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the moments, before their memory is allocated."""
        assert Part.STATES not in self.slabs
        self.layout = replace(self.layout, state_dtype=dtype)

    def allocate(self, part: Part, host_slots: int, background: bool) -> None:
        """Allocate the memory and disk space for `part` of every expert."""
        name = part.name.lower() if part.name else "?"
        size = self.size(part)
        if self._folder is not None:
            on_disk = self._slot_sizes(part, self._disk_slots, self._small.disk)
            check_folder(self._folder, sum(on_disk))
            # a unique name: two processes may share a disk folder
            path = self._folder / f"overspill-{os.getpid()}-{uuid.uuid4().hex[:8]}-{name}.bin"
            self.files[part] = RecordFile(path, self._disk_slots, size, on_disk)
        memory = self._weights if part == Part.WEIGHTS else None
        in_host = self._slot_sizes(part, host_slots, self._small.host)
        self.slabs[part] = HostSlab(
            name, host_slots, size, self.pinned, self._progress, background,
            memory=memory, sizes=in_host,
        )  # fmt: skip

    def extend(self, host_slots: int) -> None:
        """Add host slots, up to this number."""
        for slab in self.slabs.values():
            # after a failure or an interrupt, some slabs may have more slots than were counted
            slab.extend(max(0, host_slots - len(slab)))

    def wait_allocated(self) -> None:
        """Block until the memory of all slabs is allocated and pinned."""
        for slab in self.slabs.values():
            slab.wait_allocated()

    @property
    def host_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs.values())

    @property
    def disk_bytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def disk_budget(self) -> int | None:
        """Bytes of the files and free bytes of their disk; None without files."""
        return self.disk_bytes + disk_free(self._folder) if self._folder is not None else None

    def read(self, part: Part, record: int, layer: int) -> Tensor:
        """A copy of the record on disk of an expert of a layer."""
        scratch = self._scratch(part, layer)
        self.files[part].read(record, scratch)
        return scratch

    def write(self, part: Part, record: int, layer: int, fill: Callable[[Tensor], None]) -> None:
        """Set the record on disk of an expert of a layer to what `fill` writes."""
        scratch = self._scratch(part, layer)
        fill(scratch)
        self.files[part].write(record, scratch)

    def _scratch(self, part: Part, layer: int) -> Tensor:
        size = self.size_in(part, layer)
        memory = torch.empty(size + ALIGN, dtype=torch.uint8)
        skip = -memory.data_ptr() % ALIGN  # direct I/O needs an aligned buffer
        return memory[skip : skip + size]

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        for slab in self.slabs.values():
            slab.close()
        self._weights = None
