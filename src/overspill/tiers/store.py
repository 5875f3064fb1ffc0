"""The store knows where each expert is: which host row, which disk row, what of it is valid, what
has changed. It owns the slabs, the record files and the one lock that guards all of this."""

import os
import threading
import uuid
from collections.abc import Callable
from enum import IntFlag
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from overspill.core.errors import EngineError, OverspillError
from overspill.core.experts import ExpertId
from overspill.tiers.layout import ALIGN, RecordLayout
from overspill.tiers.slab import HostSlab, Progress
from overspill.tiers.ssd import RecordFile, check_folder


class Part(IntFlag):
    """What belongs to an expert, each in a slab and a record file of its own."""

    WEIGHTS = 1
    STATES = 2
    GRADS = 4


class Reader(Protocol):
    """A copy out of a host row that may still be running."""

    def done(self) -> bool: ...


class Entry:
    """Where one expert is. Every field is read and changed under the store's lock."""

    __slots__ = (
        "dirty",
        "disk_row",
        "have",
        "id",
        "io",
        "last_use",
        "number",
        "queued",
        "row",
        "stale",
        "upload",
        "version",
    )

    def __init__(self, id: ExpertId, number: int, row: int | None, disk_row: int | None) -> None:
        self.id = id
        self.number = number  # place in layer-major order
        self.row = row  # host row, None if only on disk
        self.disk_row = disk_row  # None: lives in host memory for good
        self.have = Part(0)  # valid in the host row
        self.dirty = Part(0)  # newer in the host row than on disk
        self.io = Part(0)  # being read or written now
        self.stale = False  # its gradient is complete, its update is not: weights must not be read
        self.queued = 0  # gradients on their way and updates to come: the row must stay
        self.version = 0  # of the weights; a slot holding another version is out of date
        self.upload: Reader | None = None  # the last copy that read the row
        self.last_use = 0

    @property
    def readable(self) -> bool:
        """Whether its weights of now lie in a host row."""
        return not self.stale and self.row is not None and bool(self.have & Part.WEIGHTS)


class ExpertStore:
    """Host rows and disk records of all experts.

    `home_rows` experts, spread evenly over the layers, live in host memory for good. The others
    live on disk and pass through `cache_rows` further host rows.
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        layout: RecordLayout,
        home_rows: int,
        cache_rows: int,
        pinned: bool,
        disk: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.layout = layout
        self.pinned = pinned
        self.progress = progress
        self.n_experts = n_experts
        count = n_layers * n_experts
        self.home_rows = min(home_rows, count)
        self.disk_rows = count - self.home_rows
        self.cache_rows = min(cache_rows, self.disk_rows)
        assert self.disk_rows == 0 or (disk is not None and self.cache_rows >= 1)
        self.lock = threading.RLock()
        # one lock, three doors: only those who can go on are woken
        self.wake_main = threading.Condition(self.lock)
        self.wake_loader = threading.Condition(self.lock)
        self.wake_updates = threading.Condition(self.lock)
        self.error: BaseException | None = None
        self.entries = self._number(n_layers, n_experts)
        self.free_rows = list(range(self.home_rows, self.home_rows + self.cache_rows))
        self.slabs: dict[Part, HostSlab] = {}
        self.files: dict[Part, RecordFile] = {}
        self._folder: Path | None = None
        if disk is not None and self.disk_rows:
            check_folder(disk, self.disk_rows * layout.weight_bytes)
            self._folder = disk
        try:
            # in the background, while the rows are filled
            self.take(Part.WEIGHTS, background=True)
        except BaseException:
            self.close()  # leaves no file behind
            raise

    def _number(self, n_layers: int, n_experts: int) -> list[Entry]:
        entries, rows, disk_rows = [], 0, 0
        count = n_layers * n_experts
        for number in range(count):
            id = ExpertId(*divmod(number, n_experts))
            # evenly spread, so that the disk is read at a steady rate through a step
            at_home = (number + 1) * self.home_rows // count > rows
            if at_home:
                entries.append(Entry(id, number, rows, None))
                rows += 1
            else:
                entries.append(Entry(id, number, None, disk_rows))
                disk_rows += 1
        return entries

    def row_bytes(self, part: Part) -> int:
        return self.layout.state_bytes if part == Part.STATES else self.layout.weight_bytes

    def take(self, part: Part, background: bool = False) -> None:
        """Takes the memory (and disk space) for `part` of every expert, once."""
        if part in self.slabs:
            return
        name = part.name.lower() if part.name else "?"
        rows = self.home_rows + self.cache_rows
        if self._folder is not None:
            size = self.row_bytes(part)
            check_folder(self._folder, self.disk_rows * size)
            # a name of its own: two jobs may share a disk folder
            path = self._folder / f"overspill-{os.getpid()}-{uuid.uuid4().hex[:8]}-{name}.bin"
            self.files[part] = RecordFile(path, self.disk_rows, size)
        size = self.row_bytes(part)
        self.slabs[part] = HostSlab(name, rows, size, self.pinned, self.progress, background)
        for entry in self.entries:
            if entry.disk_row is None:
                entry.have |= part

    def set_state_dtype(self, dtype: torch.dtype) -> None:
        """The dtype of the moments, known once the optimizer is there."""
        assert Part.STATES not in self.slabs
        self.layout = RecordLayout(self.layout.shape, self.layout.dtype, dtype)

    def entry(self, id: ExpertId) -> Entry:
        return self.at(id.layer, id.index)

    def at(self, layer: int, index: int) -> Entry:
        return self.entries[layer * self.n_experts + index]

    def host(self, entry: Entry, part: Part) -> Tensor:
        """The bytes of `part` in the expert's host row."""
        assert entry.row is not None
        return self.slabs[part][entry.row]

    # -- waiting and failing --------------------------------------------------------------

    def wait_main(self, ready: Callable[[], bool]) -> None:
        """Blocks (under the lock) until `ready()`; raises if a worker has failed meanwhile."""
        self.wake_main.wait_for(lambda: self.error is not None or ready())
        self.raise_error()

    def raise_error(self) -> None:
        if self.error is not None:
            if isinstance(self.error, OverspillError):
                raise self.error
            raise EngineError(
                f"a worker thread failed: {self.error!r}; the last checkpoint is safe"
            ) from self.error

    def fail(self, error: BaseException) -> None:
        """Records the first failure and wakes everybody, so that nobody waits for ever."""
        with self.lock:
            if self.error is None:
                self.error = error
            self.notify_all()

    def notify_all(self) -> None:
        for door in (self.wake_main, self.wake_loader, self.wake_updates):
            door.notify_all()

    # -- whole records, when nothing moves ------------------------------------------------

    def read_part(self, entry: Entry, part: Part) -> Tensor:
        """The bytes of `part`: the host row itself, or a copy from disk."""
        if entry.row is not None and entry.have & part:
            return self.host(entry, part)
        assert entry.disk_row is not None
        scratch = self._scratch(part)
        self.files[part].read(entry.disk_row, scratch)
        return scratch

    def write_part(self, entry: Entry, part: Part, fill: Callable[[Tensor], None]) -> None:
        """Lets `fill` change the bytes of `part` in place, wherever they lie."""
        with self.lock:
            # held throughout: nobody may read the old bytes or give the row away meanwhile
            self.wait_main(lambda: not entry.io)
            if entry.row is not None and entry.have & part:
                fill(self.host(entry, part))
                if entry.disk_row is not None:
                    entry.dirty |= part
            else:
                assert entry.disk_row is not None
                scratch = self._scratch(part)
                self.files[part].read(entry.disk_row, scratch)
                fill(scratch)
                self.files[part].write(entry.disk_row, scratch)
            if part == Part.WEIGHTS:
                entry.version += 1  # what is on the device is of the past
                self.wake_loader.notify()

    def settle(self) -> None:
        """Waits until the memory of all slabs is taken."""
        for slab in self.slabs.values():
            slab.settle()

    def set_part(self, entry: Entry, part: Part, fill: Callable[[Tensor], None]) -> None:
        """Lets `fill` set the bytes of `part` for the first time. Before anything else runs, so
        without the lock: many threads may do it, each for experts of its own."""
        if entry.row is not None and entry.have & part:
            fill(self.host(entry, part))
            return
        assert entry.disk_row is not None
        scratch = self._scratch(part)
        fill(scratch)
        self.files[part].write(entry.disk_row, scratch)

    def _scratch(self, part: Part) -> Tensor:
        size = self.row_bytes(part)
        memory = torch.empty(size + ALIGN, dtype=torch.uint8)
        skip = -memory.data_ptr() % ALIGN  # direct I/O wants an aligned buffer
        return memory[skip : skip + size]

    # -- accounts -------------------------------------------------------------------------

    def host_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs.values())

    def disk_bytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def check_conserved(self) -> None:
        """When idle: every host row is either free or held by exactly one expert."""
        with self.lock:
            held = [entry.row for entry in self.entries if entry.row is not None]
            rows = sorted([*held, *self.free_rows])
            assert rows == list(range(self.home_rows + self.cache_rows)), "host rows leaked"
            assert not any(entry.io or entry.queued for entry in self.entries), "not idle"

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        for slab in self.slabs.values():
            slab.close()
