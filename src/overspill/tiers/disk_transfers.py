"""Transfers between host slots and the disk: their marks in entries, and reads that have failed."""

from collections.abc import Callable, Iterable

from overspill.core.errors import DiskError
from overspill.tiers.entry import Entry, Part
from overspill.tiers.record_memory import RecordMemory
from overspill.tiers.worker_sync import WorkerSync


class DiskTransfers:
    """A part of the store. The listener starts transfers when entries change; the thread that
    carries one out marks its beginning and its end here."""

    def __init__(self, sync: WorkerSync, memory: RecordMemory) -> None:
        self._sync = sync
        self._memory = memory
        self._unreadable: dict[Entry, OSError] = {}  # the last read has failed
        self._on_change: Callable[[], None] | None = None

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` under the lock whenever a change may let a disk transfer start."""
        self._on_change = listener

    def request_transfers(self) -> None:
        """Let disk transfers start, after a change of what is needed in host memory."""
        with self._sync.lock:
            if self._on_change is not None:
                self._on_change()

    def entry_changed(self, entry: Entry) -> None:
        """Let disk transfers start, after a change of an entry. Called under the lock."""
        if entry.on_disk:
            self.request_transfers()

    def begin_io(self, entry: Entry, part: Part, write: bool) -> None:
        """Mark `part` as being read or written."""
        with self._sync.lock:
            entry.io |= part
            if write:
                entry.dirty &= ~part  # now: an update during the write makes it dirty again

    def cancel_io(self, entry: Entry, part: Part, write: bool) -> None:
        """Undo `begin_io` of a transfer that will not take place."""
        with self._sync.lock:
            entry.io &= ~part
            if write:
                entry.dirty |= part

    def end_io(self, entry: Entry, part: Part, write: bool) -> None:
        """Mark the transfer as ended; after a read the part is valid."""
        with self._sync.lock:
            entry.io &= ~part
            if not write:
                entry.valid |= part
            self.entry_changed(entry)
            self._sync.wake_all()

    def write_back(self, entry: Entry) -> None:
        """Write the parts that are newer in the host slot to disk. Called under the lock."""
        for part, file in self._memory.files.items():
            if entry.dirty & part:
                assert entry.disk_slot is not None
                assert entry.host_slot is not None
                size = self._memory.size_in(part, entry.id.layer)
                file.write(entry.disk_slot, self._memory.slabs[part][entry.host_slot][:size])
                entry.dirty &= ~part

    def fail_read(self, entry: Entry, error: OSError) -> None:
        """Record, in inference, that the weights could not be read: an error only where they are
        needed. They are not read ahead any more."""
        with self._sync.lock:
            self._unreadable[entry] = error
            self.entry_changed(entry)
            self._sync.wake_main()

    def is_unreadable(self, entry: Entry) -> bool:
        """Whether the last read of the expert has failed."""
        return entry in self._unreadable

    def retry_reads(self, entries: Iterable[Entry]) -> None:
        """Let experts that are needed now be read again if they could not be read."""
        with self._sync.lock:
            for entry in entries if self._unreadable else ():
                self._unreadable.pop(entry, None)

    def check_readable(self, entries: Iterable[Entry]) -> None:
        """Raise if one of these experts could not be read. Called under the lock."""
        for entry in entries if self._unreadable else ():
            if (error := self._unreadable.get(entry)) is not None:
                name = f"expert {entry.id.layer}.{entry.id.index}"
                raise DiskError(f"{name} could not be read from disk: {error}") from error
