"""The store of a model's experts: the memory, the record files, the entries (the slots of each
expert, and which of its parts are valid in host memory or newer than on disk) and the lock that
guards them. Every change of an entry is a method here, in `ExpertPlaces`, or in a part of the
store: `DecodingSlots`, `ResidentChanges`."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from torch import Tensor

from overspill.core.errors import DiskError
from overspill.core.expert_map import ExpertMap
from overspill.core.lifetime import Lifetime
from overspill.tiers.entry import Entry, Part, Reader
from overspill.tiers.layout import RecordLayout
from overspill.tiers.places import ExpertPlaces
from overspill.tiers.record_memory import RecordMemory
from overspill.tiers.remote_experts import RemoteExpert, RemoteExperts
from overspill.tiers.shared_experts import SharedExperts
from overspill.tiers.slab import Progress
from overspill.tiers.worker_sync import WATCHDOG_SECONDS


class _Issuing:
    """Stands for a copy that is being issued."""

    def done(self) -> bool:
        return False


class ExpertStore(ExpertPlaces):
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
        super().__init__(
            n_layers,
            experts,
            permanent_slots,
            cache_slots,
            residents,
            spare_records,
            watchdog_seconds,
        )
        self._unreadable: dict[Entry, OSError] = {}  # the last read has failed
        self.lifetime = Lifetime()
        self._on_change: Callable[[], None] | None = None
        self._shared = shared
        weights = None if shared is None else shared.own.weights
        self.memory = RecordMemory(layout, self.disk_slots, pinned, disk, progress, weights)
        try:
            self.allocate(Part.WEIGHTS, background=True)  # pinned while the slots are filled
            if shared is not None:
                assert self.permanent_slots == len(self.entries), (
                    "all experts must be in host memory"
                )
                self.remote_experts = RemoteExperts.of_ranks(
                    shared, n_layers, len(self.entries), pinned
                )
        except BaseException:
            self.close()  # leaves no file behind
            raise

    @property
    def layout(self) -> RecordLayout:
        """The layout of records; the optimizer may change that of states before they exist."""
        return self.memory.layout

    def allocate(self, part: Part, background: bool = False) -> None:
        """Allocate the memory and disk space for `part` of every expert, once."""
        with self.lock:
            if part in self.memory.slabs:
                return
            self.memory.allocate(part, self.host_slots, background)
            for entry in self.entries:
                if entry.host_slot is not None and not entry.on_disk:
                    entry.valid |= part

    def host(self, entry: Entry, part: Part) -> Tensor:
        """The bytes of `part` in the expert's host slot; of a remote expert, in that of its
        owner."""
        if isinstance(entry, RemoteExpert):
            assert part == Part.WEIGHTS
            return entry.weights
        assert entry.host_slot is not None
        return self.memory.slabs[part][entry.host_slot]

    def unused_memory(self, part: Part) -> list[Tensor]:
        """The memory of the free host slots, until residents are changed. There must be no experts
        on disk, which would use it."""
        assert not self.disk_slots
        return [self.memory.slabs[part][slot] for slot in self.free_slots]

    def wait_allocated(self) -> None:
        """Block until all memory is allocated and pinned."""
        self.memory.wait_allocated()
        for slab in self.remote_experts.slabs:
            slab.wait_allocated()

    def close(self) -> None:
        self.lifetime.closed = True
        self.remote_experts.close()
        self.memory.close()
        if self._shared is not None:
            self._shared.close()

    # -- versions of weights that ranks share ------------------------------------------------

    def wait_uploader(self, poll: bool = False) -> None:
        before = self._progress_of_others() if poll else 0
        super().wait_uploader(poll)
        if poll and self._progress_of_others() != before:
            self.wake_main()  # its watchdog sees that other ranks are alive

    def _progress_of_others(self) -> int:
        memories = () if self._shared is None else self._shared.memories
        return sum(int(memory.versions.sum()) for memory in memories)

    def _publish(self, entry: Entry) -> None:
        """Let other ranks read the weights."""
        if self._shared is not None:
            self._shared.own.versions[entry.number] = entry.version

    # -- disk transfers that wait for a change ---------------------------------------------

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` under the lock whenever a change may let a disk transfer start."""
        self._on_change = listener

    def request_transfers(self) -> None:
        """Let disk transfers start, after a change of what is needed in host memory."""
        with self.lock:
            if self._on_change is not None:
                self._on_change()

    def _changed(self, entry: Entry) -> None:
        if entry.on_disk:
            self.request_transfers()

    # -- users of a host slot --------------------------------------------------------------

    def hold(self, entry: Entry) -> None:
        """Keep the expert in its host slot until `release`."""
        with self.lock:
            entry.holds += 1

    def release(self, entry: Entry) -> None:
        with self.lock:
            entry.holds -= 1
            self._changed(entry)
            self.wake_main()

    def begin_upload(self, entry: Entry) -> None:
        """Keep the host slot while a copy out of it is being issued."""
        with self.lock:
            entry.upload = _Issuing()

    def end_upload(self, entry: Entry, copy: Reader) -> None:
        """Keep the host slot, for a copy that was issued, until `copy` is done."""
        with self.lock:
            entry.upload = copy

    def begin_copy(self, entry: Entry, copy: Reader) -> bool:
        """Keep the host slot until `copy`, for decoding steps, is done; False if the weights are
        not there, or another such copy reads them."""
        with self.lock:
            if not entry.readable or not (entry.copy is None or entry.copy.done()):
                return False
            if entry.on_disk:
                entry.copy = copy
            return True

    def upload_done(self, entry: Entry) -> None:
        """Let the host slot of an expert on disk be reused, after the copy has ended."""
        with self.lock:
            self._changed(entry)

    # -- gradients and updates -------------------------------------------------------------

    def begin_update(self, entry: Entry) -> None:
        """Mark the weights, here and on the GPU, as out of date until `end_update`: the gradient is
        complete."""
        with self.lock:
            entry.stale = True
            entry.version += 1

    def end_update(self, entry: Entry) -> None:
        """Mark weights and states in the host slot as new, and the gradient as used up."""
        with self.lock:
            entry.stale = False
            self._publish(entry)
            if entry.on_disk:
                entry.dirty |= Part.WEIGHTS | Part.STATES
                self._forget_gradient(entry)
            self._changed(entry)
            self.wake_uploader()

    def keep_gradient(self, entry: Entry) -> None:
        """Mark the gradient in the host slot as valid: it waits for more of it or for `step()`."""
        with self.lock:
            if entry.on_disk:
                entry.valid |= Part.GRADS
                entry.dirty |= Part.GRADS

    def discard_gradients(self, kept: Collection[int]) -> None:
        """Drop the gradients of the experts with these numbers. No update may be pending: all
        weights are current again, and no host slot is held."""
        with self.lock:
            for entry in self.entries:
                entry.stale, entry.holds = False, 0
                self._publish(entry)
                if entry.number in kept and entry.on_disk:
                    self._forget_gradient(entry)
                    self._changed(entry)
            self.wake_uploader()

    def _forget_gradient(self, entry: Entry) -> None:
        entry.valid &= ~Part.GRADS
        entry.dirty &= ~Part.GRADS

    # -- disk transfers --------------------------------------------------------------------

    def begin_io(self, entry: Entry, part: Part, write: bool) -> None:
        with self.lock:
            entry.io |= part
            if write:
                entry.dirty &= ~part  # now: an update during the write makes it dirty again

    def cancel_io(self, entry: Entry, part: Part, write: bool) -> None:
        """Undo `begin_io` of a transfer that will not take place."""
        with self.lock:
            entry.io &= ~part
            if write:
                entry.dirty |= part

    def end_io(self, entry: Entry, part: Part, write: bool) -> None:
        with self.lock:
            entry.io &= ~part
            if not write:
                entry.valid |= part
            self._changed(entry)
            self.wake_all()

    def write_back(self, entry: Entry) -> None:
        """Write the parts that are newer in the host slot to disk. Called under the lock."""
        for part, file in self.memory.files.items():
            if entry.dirty & part:
                assert entry.disk_slot is not None
                file.write(entry.disk_slot, self.host(entry, part))
                entry.dirty &= ~part

    def fail_read(self, entry: Entry, error: OSError) -> None:
        """Notes, in inference, that the weights could not be read: an error only where they are
        needed. They are not read ahead any more."""
        with self.lock:
            self._unreadable[entry] = error
            self._changed(entry)
            self.wake_main()

    def is_unreadable(self, entry: Entry) -> bool:
        return entry in self._unreadable

    def retry_reads(self, entries: Iterable[Entry]) -> None:
        """Let experts that are needed now be read again if they could not be read."""
        with self.lock:
            for entry in entries if self._unreadable else ():
                self._unreadable.pop(entry, None)

    def check_readable(self, entries: Iterable[Entry]) -> None:
        """Raise if one of these experts could not be read. Called under the lock."""
        for entry in entries if self._unreadable else ():
            if (error := self._unreadable.get(entry)) is not None:
                name = f"expert {entry.id.layer}.{entry.id.index}"
                raise DiskError(f"{name} could not be read from disk: {error}") from error

    def recover(self) -> None:
        """Restore the entries after a failure in inference, when no upload is running."""
        with self.lock:
            for entry in self.entries:
                entry.upload = None
            self.error = None

    # -- whole records, while nothing else uses them ---------------------------------------

    def read_part(self, entry: Entry, part: Part) -> Tensor:
        """The bytes of `part`: the host slot itself, or a copy from disk."""
        if entry.valid & part:
            return self.host(entry, part)
        assert entry.disk_slot is not None
        return self.memory.read(part, entry.disk_slot)

    def write_part(self, entry: Entry, part: Part, fill: Callable[[Tensor], None]) -> None:
        """Let `fill` change the bytes of `part` in place."""
        with self.lock:
            # held throughout: the old bytes must not be read and the slot must not be reused
            name = f"{entry.id.layer}.{entry.id.index}"
            self.wait(lambda: not entry.io, f"disk transfers of expert {name}")
            if entry.valid & part:
                fill(self.host(entry, part))
                if entry.on_disk:
                    entry.dirty |= part
            else:
                assert entry.disk_slot is not None
                scratch = self.memory.read(part, entry.disk_slot)
                fill(scratch)
                self.memory.files[part].write(entry.disk_slot, scratch)
            if part == Part.WEIGHTS:
                entry.version += 1  # the copy on the GPU is out of date
                if not entry.stale:
                    self._publish(entry)
                self.wake_uploader()

    def set_part(self, entry: Entry, part: Part, fill: Callable[[Tensor], None]) -> None:
        """Let `fill` set the bytes of `part` for the first time. Without the lock, because nothing
        else runs yet: several threads may do it, each for experts of its own."""
        if entry.valid & part:
            fill(self.host(entry, part))
            return
        assert entry.disk_slot is not None
        self.memory.write(part, entry.disk_slot, fill)
