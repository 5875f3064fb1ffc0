"""The store of a model's experts: the memory, the record files, the entries (the slots of each
expert, and which of its parts are valid in host memory or newer than on disk) and the lock that
guards them. Every change of an entry is a method here or in a part of the store: `ExpertPlaces`,
`DiskTransfers`, `DecodingSlots`, `ResidentChanges`."""

from collections.abc import Callable, Collection
from pathlib import Path

from torch import Tensor

from overspill.core.expert_map import ExpertMap
from overspill.core.lifetime import Lifetime
from overspill.tiers.disk_transfers import DiskTransfers
from overspill.tiers.entry import Entry, Part, Reader
from overspill.tiers.layout import RecordLayout
from overspill.tiers.places import ExpertPlaces
from overspill.tiers.record_memory import RecordMemory, SmallSlots
from overspill.tiers.remote_experts import RemoteExpert, RemoteExperts
from overspill.tiers.replicas import Replicas
from overspill.tiers.shared_experts import SharedExperts
from overspill.tiers.slab import Progress
from overspill.tiers.worker_sync import WATCHDOG_SECONDS, WorkerSync


class _Issuing:
    """Stands for a copy that is being issued."""

    def done(self) -> bool:
        return False


class ExpertStore:
    """The entries of all local experts, and the host slots and disk records of streamed ones."""

    def __init__(
        self,
        n_layers: int,
        experts: ExpertMap,
        layout: RecordLayout,
        permanent_slots: int,
        cache_slots: int,
        pinned: bool,
        disk: Path | None = None,
        progress: Progress | None = None,
        watchdog_seconds: float = WATCHDOG_SECONDS,
        residents: list[int] | None = None,
        spare_records: int = 0,
        shared: SharedExperts | None = None,
    ) -> None:
        """`shared` is memory for the weights that other ranks read. All experts are in host memory
        then."""
        self.sync = WorkerSync(watchdog_seconds)
        """The lock of all entries, and waits of threads for each other."""
        self.weight_bytes = [layout.weight_bytes_in(layer) for layer in range(n_layers)]
        """Bytes of the weight records of each layer."""
        small = {n for n, size in enumerate(self.weight_bytes) if size < layout.weight_bytes}
        self._is_mixed = bool(small)
        assert shared is None or not small
        places = self.places = ExpertPlaces(
            self.sync, n_layers, experts, permanent_slots, cache_slots, residents, spare_records,
            small,
        )  # fmt: skip
        self.sync.disk_busy = places.disk_busy
        self.replicas = Replicas()
        self.lifetime = Lifetime()
        self._shared = shared
        weights = None if shared is None else shared.own.weights
        self.memory = RecordMemory(
            layout, places.disk_slots, pinned, disk, progress, weights, self._small_slots()
        )
        self.disk = DiskTransfers(self.sync, self.memory)
        try:
            self.allocate(Part.WEIGHTS, background=True)  # pinned while the slots are filled
            if shared is not None:
                count = len(places.entries)
                assert places.permanent_slots == count, "all experts must be in host memory"
                places.remote_experts = RemoteExperts.of_ranks(shared, n_layers, count, pinned)
                self.sync.remote_progress = shared.progress
        except BaseException:
            self.close()  # leaves no file behind
            raise

    def _small_slots(self) -> SmallSlots:
        small = SmallSlots({}, {})
        for number, home in self.places.homes.items():
            sizes = small.host if home.in_host else small.disk
            sizes[home.slot] = self.weight_bytes[self.places.entries[number].id.layer]
        return small

    def allocate(self, part: Part, background: bool = False) -> None:
        """Allocate the memory and disk space for `part` of every expert, once."""
        with self.sync.lock:
            if part in self.memory.slabs:
                return
            self.memory.allocate(part, self.places.host_slots, background)
            for entry in self.places.entries:
                if entry.host_slot is not None and not entry.on_disk:
                    entry.valid |= part

    def host(self, entry: Entry, part: Part) -> Tensor:
        """The bytes of `part` in the expert's host slot; of a remote expert, in that of its
        owner."""
        if isinstance(entry, RemoteExpert):
            assert part == Part.WEIGHTS
            return entry.weights
        assert entry.host_slot is not None
        memory = self.memory.slabs[part][entry.host_slot]
        if self._is_mixed:  # the slot may be larger
            return memory[: self.memory.size_in(part, entry.id.layer)]
        return memory

    def wait_allocated(self) -> None:
        """Block until all memory is allocated and pinned."""
        self.memory.wait_allocated()
        for slab in self.places.remote_experts.slabs:
            slab.wait_allocated()

    def close(self) -> None:
        self.lifetime.closed = True
        self.places.remote_experts.close()
        self.memory.close()
        if self._shared is not None:
            self._shared.close()

    def _publish(self, entry: Entry) -> None:
        """Let other ranks read the weights."""
        if self._shared is not None:
            self._shared.own.versions[entry.number] = entry.version

    # -- users of a host slot --------------------------------------------------------------

    def hold(self, entry: Entry) -> None:
        """Keep the expert in its host slot until `release`."""
        with self.sync.lock:
            entry.holds += 1

    def release(self, entry: Entry) -> None:
        with self.sync.lock:
            entry.holds -= 1
            self.disk.entry_changed(entry)
            self.sync.wake_main()

    def begin_upload(self, entry: Entry) -> None:
        """Keep the host slot while a copy out of it is being issued."""
        with self.sync.lock:
            entry.upload = _Issuing()

    def end_upload(self, entry: Entry, copy: Reader) -> None:
        """Keep the host slot, for a copy that was issued, until `copy` is done."""
        with self.sync.lock:
            entry.upload = copy

    def begin_copy(self, entry: Entry, copy: Reader) -> bool:
        """Keep the host slot until `copy`, for decoding steps, is done; False if the weights are
        not there, or another such copy reads them."""
        with self.sync.lock:
            if not entry.readable or not (entry.copy is None or entry.copy.done()):
                return False
            if entry.on_disk:
                entry.copy = copy
            return True

    def upload_done(self, entry: Entry) -> None:
        """Let the host slot of an expert on disk be reused, after the copy has ended."""
        with self.sync.lock:
            self.disk.entry_changed(entry)

    # -- gradients and updates -------------------------------------------------------------

    def begin_update(self, entry: Entry) -> None:
        """Mark the weights, here and on the GPU, as out of date until `end_update`: the gradient is
        complete."""
        with self.sync.lock:
            entry.stale = True
            entry.version += 1

    def end_update(self, entry: Entry) -> None:
        """Mark weights and states in the host slot as new, and the gradient as used up."""
        with self.sync.lock:
            entry.stale = False
            self._publish(entry)
            if entry.on_disk:
                entry.dirty |= Part.WEIGHTS | Part.STATES
                self._forget_gradient(entry)
            self.disk.entry_changed(entry)
            self.sync.wake_uploader()

    def keep_gradient(self, entry: Entry) -> None:
        """Mark the gradient in the host slot as valid: it waits for more of it or for `step()`."""
        with self.sync.lock:
            if entry.on_disk:
                entry.valid |= Part.GRADS
                entry.dirty |= Part.GRADS

    def discard_gradients(self, kept: Collection[int]) -> None:
        """Drop the gradients of the experts with these numbers. No update may be pending: all
        weights are current again, and no host slot is held."""
        with self.sync.lock:
            for entry in self.places.entries:
                entry.stale, entry.holds = False, 0
                self._publish(entry)
                if entry.number in kept and entry.on_disk:
                    self._forget_gradient(entry)
                    self.disk.entry_changed(entry)
            self.sync.wake_uploader()

    def _forget_gradient(self, entry: Entry) -> None:
        entry.valid &= ~Part.GRADS
        entry.dirty &= ~Part.GRADS

    def recover(self) -> None:
        """Restore the entries after a failure in inference, when no upload is running."""
        with self.sync.lock:
            for entry in self.places.entries:
                entry.upload = None
            self.sync.error = None

    # -- whole records, while nothing else uses them ---------------------------------------

    def read_part(self, entry: Entry, part: Part) -> Tensor:
        """The bytes of `part`: the host slot itself, or a copy from disk."""
        if entry.valid & part:
            return self.host(entry, part)
        assert entry.disk_slot is not None
        return self.memory.read(part, entry.disk_slot, entry.id.layer)

    def write_part(self, entry: Entry, part: Part, fill: Callable[[Tensor], None]) -> None:
        """Let `fill` change the bytes of `part` in place."""
        with self.sync.lock:
            # held throughout: the old bytes must not be read and the slot must not be reused
            name = f"{entry.id.layer}.{entry.id.index}"
            self.sync.wait(lambda: not entry.io, f"disk transfers of expert {name}")
            if entry.valid & part:
                fill(self.host(entry, part))
                if entry.on_disk:
                    entry.dirty |= part
            else:
                assert entry.disk_slot is not None
                scratch = self.memory.read(part, entry.disk_slot, entry.id.layer)
                fill(scratch)
                self.memory.files[part].write(entry.disk_slot, scratch)
            if part == Part.WEIGHTS:
                entry.version += 1  # the copy on the GPU is out of date
                if not entry.stale:
                    self._publish(entry)
                self.sync.wake_uploader()

    def set_part(self, entry: Entry, part: Part, fill: Callable[[Tensor], None]) -> None:
        """Let `fill` set the bytes of `part` for the first time. Without the lock, because nothing
        else runs yet: several threads may do it, each for experts of its own."""
        if entry.valid & part:
            fill(self.host(entry, part))
            return
        assert entry.disk_slot is not None
        self.memory.write(part, entry.disk_slot, entry.id.layer, fill)
