"""The store knows where each expert is: its host slot, its disk slot, which of its parts are valid
in host memory and which are newer than on disk. It owns the memory, the record files, the entries
and the lock that guards them. Every change of an entry is a method here."""

import os
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from overspill.core.errors import DiskError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId
from overspill.core.lifetime import Lifetime
from overspill.tiers.entry import Entry, Part, Reader
from overspill.tiers.layout import ALIGN, RecordLayout
from overspill.tiers.slab import HostSlab, Progress
from overspill.tiers.ssd import RecordFile, check_folder
from overspill.tiers.worker_sync import WATCHDOG_SECONDS, WorkerSync


class _Issuing:
    """Stands for a copy that is being issued."""

    def done(self) -> bool:
        return False


class ExpertStore(WorkerSync):
    """Where all local experts are, and the host slots and disk records of those that are streamed.

    The first `homes[layer]` experts of each layer have their home on the compute device and nothing
    here. Of the others, `home_slots`, spread evenly over the layers, always stay in host memory;
    the rest is on disk and passes through `cache_slots` further host slots.
    """

    def __init__(
        self,
        n_layers: int,
        experts: ExpertMap,
        layout: RecordLayout,
        home_slots: int,
        cache_slots: int,
        pinned: bool,
        disk: Path | None = None,
        progress: Progress | None = None,
        watchdog_seconds: float = WATCHDOG_SECONDS,
        homes: list[int] | None = None,
        spare_records: int = 0,
    ) -> None:
        """If there are experts on disk, `spare_records` further ones find room there."""
        self.layout = layout
        self.pinned = pinned
        self.experts = experts
        self.maps = [experts] * n_layers
        """Which expert of each layer is at which position."""
        self.n_layers = n_layers
        self.homes = homes if homes is not None else [0] * n_layers
        """Experts of each layer at home on the compute device: the first ones."""
        count = n_layers * experts.n_local - sum(self.homes)
        self.home_slots = min(home_slots, count)
        on_disk = count - self.home_slots
        self.disk_slots = on_disk + spare_records if on_disk else 0
        cache_slots = min(cache_slots, on_disk)
        self.host_slots = self.home_slots + cache_slots
        self._least_cache = cache_slots
        assert self.disk_slots == 0 or (disk is not None and cache_slots >= 1)
        super().__init__(watchdog_seconds)
        self.entries = self._number_entries(count)
        self._cached: dict[Entry, None] = {}
        self.recount_slots()
        self._unreadable: dict[Entry, OSError] = {}  # the last read has failed
        self.lifetime = Lifetime()
        self._on_change: Callable[[], None] | None = None
        self._progress = progress
        self.slabs: dict[Part, HostSlab] = {}
        self.files: dict[Part, RecordFile] = {}
        self._folder: Path | None = None
        if disk is not None and self.disk_slots:
            check_folder(disk, self.disk_slots * layout.weight_bytes)
            self._folder = disk
        try:
            self.allocate(Part.WEIGHTS, background=True)  # pinned while the slots are filled
        except BaseException:
            self.close()  # leaves no file behind
            raise

    def _number_entries(self, streamed: int) -> list[Entry]:
        entries, in_host, on_disk = [], 0, 0
        for number in range(self.n_layers * self.experts.n_local):
            layer, position = divmod(number, self.experts.n_local)
            id = ExpertId(layer, self.experts.global_id(position))
            if position < self.homes[layer]:
                entries.append(Entry(id, number, None, None))
            # evenly spread, so that the disk is read at a steady rate through a step
            elif (in_host + on_disk + 1) * self.home_slots // streamed > in_host:
                entries.append(Entry(id, number, in_host, None))
                in_host += 1
            else:
                entries.append(Entry(id, number, None, on_disk))
                on_disk += 1
        return entries

    # -- memory ---------------------------------------------------------------------------

    def part_bytes(self, part: Part) -> int:
        return self.layout.state_bytes if part == Part.STATES else self.layout.weight_bytes

    def allocate(self, part: Part, background: bool = False) -> None:
        """Allocates the memory and disk space for `part` of every expert, once."""
        with self.lock:
            if part in self.slabs:
                return
            name = part.name.lower() if part.name else "?"
            size = self.part_bytes(part)
            if self._folder is not None:
                check_folder(self._folder, self.disk_slots * size)
                # a unique name: two processes may share a disk folder
                path = self._folder / f"overspill-{os.getpid()}-{uuid.uuid4().hex[:8]}-{name}.bin"
                self.files[part] = RecordFile(path, self.disk_slots, size)
            self.slabs[part] = HostSlab(
                name, self.host_slots, size, self.pinned, self._progress, background
            )
            for entry in self.entries:
                if entry.host_slot is not None and entry.disk_slot is None:
                    entry.valid |= part

    def set_state_dtype(self, dtype: torch.dtype) -> None:
        """Sets the dtype of the moments, before their memory is allocated."""
        assert Part.STATES not in self.slabs
        self.layout = RecordLayout(self.layout.shape, self.layout.dtype, dtype)

    def wait_allocated(self) -> None:
        """Blocks until the memory of all slabs is allocated and pinned."""
        for slab in self.slabs.values():
            slab.wait_allocated()

    def host_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs.values())

    def disk_bytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    @property
    def in_host(self) -> int:
        """Experts that always stay in host memory."""
        return sum(e.host_slot is not None and e.disk_slot is None for e in self.entries)

    @property
    def on_disk(self) -> int:
        """Experts on disk."""
        return self.disk_slots - len(self._free_records)

    @property
    def cache_slots(self) -> int:
        """Host slots that the experts on disk share."""
        return len(self._free_slots) + len(self._cached)

    # -- lookup ---------------------------------------------------------------------------

    def entry(self, id: ExpertId) -> Entry:
        return self.at(id.layer, self.maps[id.layer].position(id.index))

    def id_of(self, number: int) -> ExpertId:
        """The expert that is at a position now, by the number of its entry."""
        layer, position = divmod(number, self.experts.n_local)
        return ExpertId(layer, self.maps[layer].global_id(position))

    def at(self, layer: int, position: int) -> Entry:
        return self.entries[layer * self.experts.n_local + position]

    def layer_entries(self, layer: int) -> list[Entry]:
        first = layer * self.experts.n_local
        return self.entries[first : first + self.experts.n_local]

    def streamed(self, layer: int) -> list[Entry]:
        """The experts of a layer that are not at home on the compute device."""
        return self.layer_entries(layer)[self.homes[layer] :]

    def position(self, entry: Entry) -> int:
        """The local position of an expert in its layer."""
        return entry.number % self.experts.n_local

    def host(self, entry: Entry, part: Part) -> Tensor:
        """The bytes of `part` in the expert's host slot."""
        assert entry.host_slot is not None
        return self.slabs[part][entry.host_slot]

    # -- disk transfers that wait for a change --------------------------------------------

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` under the lock whenever a change may let a disk transfer start."""
        self._on_change = listener

    def request_transfers(self) -> None:
        """What is needed in host memory has changed: lets disk transfers start."""
        with self.lock:
            if self._on_change is not None:
                self._on_change()

    def _changed(self, entry: Entry) -> None:
        if entry.disk_slot is not None:
            self.request_transfers()

    # -- users of a host slot ---------------------------------------------------------------

    def hold(self, entry: Entry) -> None:
        """Keeps the expert in its host slot until `release`."""
        with self.lock:
            entry.holds += 1

    def release(self, entry: Entry) -> None:
        with self.lock:
            entry.holds -= 1
            self._changed(entry)
            self.wake_main()

    def hold_slots(
        self,
        entries: Sequence[Entry],
        order: Sequence[Entry] | None = None,
        ahead: Collection[Entry] = (),
    ) -> list[Entry] | None:
        """Keeps these experts in host slots until `release_slots`, without other transfers. Returns
        those whose weights must be read there now, then `end_reads`; None if one of them, or too
        many others, are being read, written, updated or uploaded. Those of `ahead` may still be
        read. The first ones in `order` lose their slots; by default the least recently used."""
        with self.lock:
            self.raise_error()
            if any(entry.stale or (entry.io and entry not in ahead) for entry in entries):
                return None
            for entry in entries:
                entry.holds += 1
                self.touch(entry)
            missing = [e for e in entries if not (e.valid | e.io) & Part.WEIGHTS]
            for entry in missing:
                if entry.host_slot is None and not self.assign_host_slot(entry, (), order):
                    self.release_slots(entries)
                    self._write_oldest()
                    return None
            for entry in missing:
                entry.io |= Part.WEIGHTS
            return missing

    def begin_reads(
        self, entries: Iterable[Entry], order: Sequence[Entry], keep: Iterable[Entry] = ()
    ) -> list[Entry]:
        """Gives host slots to experts that will be needed, as far as those in `order` can leave
        theirs without these and those to `keep`, and returns whose weights are to be read now, then
        `end_reads`."""
        needed = {*entries, *keep}
        with self.lock:
            found: list[Entry] = []
            for entry in entries:
                if entry.disk_slot is None or entry.io or entry.stale or entry.readable:
                    continue
                if entry.host_slot is None and not self.assign_host_slot(entry, needed, order):
                    break
                entry.io |= Part.WEIGHTS
                found.append(entry)
            return found

    def end_reads(self, entries: Iterable[Entry], succeeded: bool = True) -> None:
        with self.lock:
            for entry in entries:
                entry.io &= ~Part.WEIGHTS
                if succeeded:
                    entry.valid |= Part.WEIGHTS
            if self.main_waits:  # it may be for one of them
                self.wake_all()

    def release_slots(self, entries: Iterable[Entry]) -> None:
        with self.lock:
            for entry in entries:
                entry.holds -= 1
            if self.main_waits:  # a pass of another thread, whose experts may have lost their slots
                self.request_transfers()

    def begin_upload(self, entry: Entry) -> None:
        """Keeps the host slot while a copy out of it is being issued."""
        with self.lock:
            entry.upload = _Issuing()

    def end_upload(self, entry: Entry, copy: Reader) -> None:
        """The copy was issued: the slot is in use until `copy` is done."""
        with self.lock:
            entry.upload = copy

    def begin_copy(self, entry: Entry, copy: Reader) -> bool:
        """Keeps the host slot until `copy`, for decoding steps, is done; False if the weights are
        not there, or another such copy reads them."""
        with self.lock:
            if not entry.readable or not (entry.copy is None or entry.copy.done()):
                return False
            if entry.disk_slot is not None:
                entry.copy = copy
            return True

    def upload_done(self, entry: Entry) -> None:
        """The copy has ended; the host slot of an expert on disk may be reused."""
        with self.lock:
            self._changed(entry)

    # -- gradients and updates --------------------------------------------------------------

    def begin_update(self, entry: Entry) -> None:
        """The expert's gradient is complete: its weights, here and on the GPU, are out of date
        until `end_update`."""
        with self.lock:
            entry.stale = True
            entry.version += 1

    def end_update(self, entry: Entry) -> None:
        """Weights and states in the host slot are new; the gradient is used up."""
        with self.lock:
            entry.stale = False
            if entry.disk_slot is not None:
                entry.dirty |= Part.WEIGHTS | Part.STATES
                self._forget_gradient(entry)
            self._changed(entry)
            self.wake_uploader()

    def keep_gradient(self, entry: Entry) -> None:
        """The host slot holds a gradient that waits for more of it or for `step()`."""
        with self.lock:
            if entry.disk_slot is not None:
                entry.valid |= Part.GRADS
                entry.dirty |= Part.GRADS

    def discard_gradients(self, kept: Collection[int]) -> None:
        """Drops the gradients of the experts with these numbers. No update is pending: all weights
        are current again, and no host slot is held."""
        with self.lock:
            for entry in self.entries:
                entry.stale, entry.holds = False, 0
                if entry.number in kept and entry.disk_slot is not None:
                    self._forget_gradient(entry)
                    self._changed(entry)
            self.wake_uploader()

    def _forget_gradient(self, entry: Entry) -> None:
        entry.valid &= ~Part.GRADS
        entry.dirty &= ~Part.GRADS

    # -- disk transfers ---------------------------------------------------------------------

    def cached(self) -> Iterable[Entry]:
        """Under the lock: the experts on disk that have a host slot."""
        return self._cached

    def disk_busy(self) -> bool:
        return any(entry.io for entry in self._cached)

    def touch(self, entry: Entry) -> None:
        """Notes that the expert is needed, for the choice of the least recently used."""
        with self.lock:
            if entry in self._cached:
                del self._cached[entry]
                self._cached[entry] = None

    def assign_host_slot(
        self, entry: Entry, needed: Collection[Entry], order: Iterable[Entry] | None = None
    ) -> bool:
        """Gives the expert a host slot: a free one, or that of the least recently used expert, or
        the first in `order`, that is not among the `needed` and not in use. False if there is
        none."""
        with self.lock:
            assert entry.host_slot is None
            if not self._free_slots:
                held = self._cached if order is None else (e for e in order if e in self._cached)
                idle = (each for each in held if each not in needed and each.evictable)
                first = next(idle, None)
                if first is None:
                    return False
                self._evict(first)
            entry.host_slot = self._free_slots.pop()
            entry.valid = Part(0)
            self._cached[entry] = None
            return True

    def _evict(self, entry: Entry) -> None:
        assert entry.host_slot is not None
        self._free_slots.append(entry.host_slot)
        entry.host_slot, entry.valid = None, Part(0)
        entry.upload = entry.copy = None
        del self._cached[entry]

    def recount_slots(self) -> None:
        """At the beginning and after an interrupt: the entries say which slots are free."""
        with self.lock:
            for layer, count in enumerate(self.homes):
                for entry in self.layer_entries(layer)[:count]:
                    entry.host_slot = entry.disk_slot = None
                    entry.upload = entry.copy = None
                    entry.valid = entry.dirty = Part(0)
            in_host = [entry for entry in self.entries if entry.host_slot is not None]
            on_disk = [entry for entry in self.entries if entry.disk_slot is not None]
            held = {entry.host_slot for entry in in_host}
            # experts on disk that have a host slot, the least recently used first
            cached = {entry for entry in in_host if entry.disk_slot is not None}
            known = [entry for entry in self._cached if entry in cached]
            self._cached = dict.fromkeys([*known, *cached])
            self._free_slots = [slot for slot in range(self.host_slots) if slot not in held]
            stored = {entry.disk_slot for entry in on_disk}
            self._free_records = [n for n in range(self.disk_slots) if n not in stored]

    def begin_io(self, entry: Entry, part: Part, write: bool) -> None:
        with self.lock:
            entry.io |= part
            if write:
                entry.dirty &= ~part  # now: an update during the write makes it dirty again

    def cancel_io(self, entry: Entry, part: Part, write: bool) -> None:
        """The transfer will not take place."""
        with self.lock:
            entry.io &= ~part
            if write:
                entry.dirty |= part

    def fail_read(self, entry: Entry, error: OSError) -> None:
        """The weights could not be read, in inference: an error only where they are needed. They
        are not read ahead any more."""
        with self.lock:
            self._unreadable[entry] = error
            self._changed(entry)
            self.wake_main()

    def is_unreadable(self, entry: Entry) -> bool:
        return entry in self._unreadable

    def retry_reads(self, entries: Iterable[Entry]) -> None:
        """These experts are needed now: those that could not be read may be read again."""
        with self.lock:
            for entry in entries if self._unreadable else ():
                self._unreadable.pop(entry, None)

    def check_readable(self, entries: Iterable[Entry]) -> None:
        """Under the lock: raises if one of these experts could not be read."""
        for entry in entries if self._unreadable else ():
            if (error := self._unreadable.get(entry)) is not None:
                name = f"expert {entry.id.layer}.{entry.id.index}"
                raise DiskError(f"{name} could not be read from disk: {error}") from error

    def end_io(self, entry: Entry, part: Part, write: bool) -> None:
        with self.lock:
            entry.io &= ~part
            if not write:
                entry.valid |= part
            self._changed(entry)
            self.wake_all()

    def recover(self) -> None:
        """After a failure in inference, when no upload is running: the experts are as before."""
        with self.lock:
            for entry in self.entries:
                entry.upload = None
            self.error = None

    # -- homes on the compute device, changed while nothing is transferred ----------------------

    def leave_host(self, layer: int, count: int) -> None:
        """The home of the first `count` experts of a layer is the compute device now: their host
        slots and disk slots are free."""
        with self.lock:
            self.homes[layer] = count
            self.recount_slots()

    def enter_host(self, entry: Entry, fills: Mapping[Part, Callable[[Tensor], None]]) -> None:
        """The expert, the last one of its layer at home on the device, gets a host slot or a disk
        slot; `fills` write its parts."""
        with self.lock:
            layer = entry.id.layer
            assert self.position(entry) == self.homes[layer] - 1
            if len(self._free_slots) > self._least_cache:  # those on disk need some
                slot = self._free_slots[-1]
                for part, fill in fills.items():
                    fill(self.slabs[part][slot])
                entry.host_slot, entry.valid = slot, Part(sum(self.slabs))
                free = self._free_slots
            else:
                record = self._free_records[-1]
                for part, fill in fills.items():
                    scratch = self._scratch(part)
                    fill(scratch)
                    self.files[part].write(record, scratch)
                entry.disk_slot = record
                free = self._free_records
            entry.version += 1
            self.homes[layer] -= 1  # until now it was on the device, whatever came
            free.pop()

    def unused_memory(self, part: Part) -> list[Tensor]:
        """The memory of host slots that no expert has, until homes are changed. Experts on disk
        would use it: there are none."""
        assert not self.disk_slots
        return [self.slabs[part][slot] for slot in self._free_slots]

    def load_weights(self, entry: Entry) -> Tensor:
        """The weights in the expert's host slot; an expert on disk gets one."""
        with self.lock:
            if not entry.readable:
                if entry.host_slot is None and not self.assign_host_slot(entry, ()):
                    self.empty_cache()  # what is not yet on disk is written now
                    self.assign_host_slot(entry, ())
                assert entry.disk_slot is not None
                memory = self.host(entry, Part.WEIGHTS)
                self.files[Part.WEIGHTS].read(entry.disk_slot, memory)
                entry.valid |= Part.WEIGHTS
            return self.host(entry, Part.WEIGHTS)

    def exchange(self, home: Entry, streamed: Entry, copy: Callable[[], None]) -> None:
        """Two experts of a layer exchange their places, one at home on the device and one in a host
        slot: `copy` exchanges their weights. If it raises, the caller has the old weights."""
        layer = home.id.layer
        with self.lock:
            new = self.maps[layer].exchanged(self.position(home), self.position(streamed))
            streamed.version += 1  # the copy on the GPU is out of date
            if streamed.disk_slot is not None:
                streamed.dirty |= Part.WEIGHTS
            copy()
            self.maps[layer] = new
            home.id, streamed.id = streamed.id, home.id

    def empty_cache(self) -> None:
        """Takes experts on disk out of their host slots. While nothing is transferred."""
        with self.lock:
            for entry in list(self._cached):
                self._write_back(entry)
                self._evict(entry)

    def _write_oldest(self) -> None:
        """Writes an expert whose host slot is not used to disk, if it is newer there: the stager
        keeps those that the next pass needs."""
        for entry in self._cached:
            if entry.dirty and not entry.io and not entry.holds:
                self._write_back(entry)
                return

    def _write_back(self, entry: Entry) -> None:
        for part, file in self.files.items():
            if entry.dirty & part:
                assert entry.disk_slot is not None
                file.write(entry.disk_slot, self.host(entry, part))
                entry.dirty &= ~part

    def missing_slots(self, count: int) -> int:
        """How many host slots must be added before `count` experts can leave the device."""
        with self.lock:
            to_host = count - len(self._free_records)
            missing = to_host + self._least_cache - len(self._free_slots)
            return max(0, missing) if to_host > 0 else 0

    def extend(self, count: int) -> None:
        """Adds host slots."""
        with self.lock:
            for slab in self.slabs.values():  # one of them may have failed before
                slab.extend(self.host_slots + count - len(slab))
            self._free_slots += range(self.host_slots, self.host_slots + count)
            self.host_slots += count

    # -- whole records, while nothing else uses them ------------------------------------------

    def read_part(self, entry: Entry, part: Part) -> Tensor:
        """The bytes of `part`: the host slot itself, or a copy from disk."""
        if entry.host_slot is not None and entry.valid & part:
            return self.host(entry, part)
        assert entry.disk_slot is not None
        scratch = self._scratch(part)
        self.files[part].read(entry.disk_slot, scratch)
        return scratch

    def write_part(self, entry: Entry, part: Part, fill: Callable[[Tensor], None]) -> None:
        """Lets `fill` change the bytes of `part` in place."""
        with self.lock:
            # held throughout: the old bytes must not be read and the slot must not be reused
            name = f"{entry.id.layer}.{entry.id.index}"
            self.wait(lambda: not entry.io, f"disk transfers of expert {name}")
            if entry.host_slot is not None and entry.valid & part:
                fill(self.host(entry, part))
                if entry.disk_slot is not None:
                    entry.dirty |= part
            else:
                assert entry.disk_slot is not None
                scratch = self._scratch(part)
                self.files[part].read(entry.disk_slot, scratch)
                fill(scratch)
                self.files[part].write(entry.disk_slot, scratch)
            if part == Part.WEIGHTS:
                entry.version += 1  # the copy on the GPU is out of date
                self.wake_uploader()

    def set_part(self, entry: Entry, part: Part, fill: Callable[[Tensor], None]) -> None:
        """Lets `fill` set the bytes of `part` for the first time. Without the lock, because nothing
        else runs yet: several threads may do it, each for experts of its own."""
        if entry.host_slot is not None and entry.valid & part:
            fill(self.host(entry, part))
            return
        assert entry.disk_slot is not None
        scratch = self._scratch(part)
        fill(scratch)
        self.files[part].write(entry.disk_slot, scratch)

    def _scratch(self, part: Part) -> Tensor:
        size = self.part_bytes(part)
        memory = torch.empty(size + ALIGN, dtype=torch.uint8)
        skip = -memory.data_ptr() % ALIGN  # direct I/O needs an aligned buffer
        return memory[skip : skip + size]

    # -- end --------------------------------------------------------------------------------

    def check_conserved(self) -> None:
        """When idle: every host slot is either free or held by exactly one expert."""
        with self.lock:
            held = [entry.host_slot for entry in self.entries if entry.host_slot is not None]
            slots = sorted([*held, *self._free_slots])
            assert slots == list(range(self.host_slots)), "host slots leaked"
            stored = [entry.disk_slot for entry in self.entries if entry.disk_slot is not None]
            records = sorted([*stored, *self._free_records])
            assert records == list(range(self.disk_slots)), "disk slots leaked"
            assert not any(entry.io or entry.holds for entry in self.entries), "not idle"

    def close(self) -> None:
        self.lifetime.closed = True
        for file in self.files.values():
            file.close()
        for slab in self.slabs.values():
            slab.close()
