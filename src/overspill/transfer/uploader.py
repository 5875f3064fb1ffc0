"""The uploader fills the slots of the compute device. Its caller decides which expert belongs in
which slot, in the order of need; the uploader copies each as soon as its record is ready in host
memory.

Two implementations: `ThreadUploader`, a Python thread that works on every device and tier, and
`NativeUploader`, a C++ thread for experts that always stay in host memory.

A copy that was issued cannot be withdrawn. So the record of an expert that is only expected to be
needed is copied in pieces, and at most one piece is queued behind the one being copied: an upload
that becomes urgent waits for one record at most. Records that are certainly needed are copied
whole and queued further ahead.
"""

import abc
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from overspill.core.sizes import round_up
from overspill.tiers.entry import Entry
from overspill.tiers.layout import ALIGN
from overspill.tiers.remote_experts import RemoteExpert
from overspill.transfer.streams import COMPLETED, StreamEvent

REPLICAS = "replicas"
"""Counter of the bytes that uploads copy from replicas, within the device."""


class Target(NamedTuple):
    """An expert and the slot it belongs in."""

    entry: Entry
    slot: int
    reason: str = ""  # why it is expected to be needed; shown in the trace
    certain: bool = False  # no more urgent upload can come before it is needed


class PieceSizes(NamedTuple):
    """Sizes of the pieces of uploads, and of the queue of copies, in bytes."""

    piece: int = 4 << 20
    """The smallest piece of a record; from 4 MiB on a copy uses the full bandwidth of the link."""
    align: int = ALIGN
    certain_in_flight: int = 128 << 20
    """Bytes in flight of records that are certainly needed: the uploader wakes less often."""

    def piece_of(self, record: int) -> int:
        """A quarter of a record, but not less than `piece`."""
        return max(self.piece, round_up(record // 4, self.align))


class Slot:
    """Memory for one record on the compute device. Guarded by the store's lock."""

    __slots__ = ("entry", "free", "ready", "used", "version")

    def __init__(self) -> None:
        self.entry: Entry | None = None  # the expert it holds, or whose upload was requested
        self.version = -1  # of its weights
        self.ready: StreamEvent = COMPLETED  # end of the upload
        self.free: StreamEvent = COMPLETED  # end of the last computation that reads the slot
        self.used = False  # whether a computation has read the slot since the upload


class Uploader(abc.ABC):
    """Uploads of experts into slots. Methods marked (lock) are called under the store's lock."""

    def __init__(
        self, slab: Tensor, n_slots: int, sizes: PieceSizes, weight_bytes: Sequence[int]
    ) -> None:
        """`weight_bytes` are those of the records of each layer."""
        self.slab = slab
        self.slots = [Slot() for _ in range(n_slots)]
        self.weight_bytes = weight_bytes
        self.record_bytes = slab.shape[1]
        """Bytes of the largest record."""
        self.piece_bytes = sizes.piece_of(self.record_bytes)
        self._certain_in_flight = max(self.piece_bytes, sizes.certain_in_flight)
        self._overlap = True

    @abc.abstractmethod
    def set_targets(self, targets: Sequence[Target]) -> None:
        """Replace the list of experts and their slots, most urgent first. Uploads of the old list
        that have not started are dropped. (lock)"""

    @abc.abstractmethod
    def is_issued(self, entry: Entry, slot: int) -> bool:
        """Whether the upload of the expert's current weights into `slot` was issued. (lock)"""

    @abc.abstractmethod
    def wait_issued(self, pairs: Sequence[tuple[Entry, int]], every: bool) -> None:
        """Block until the upload of one of these experts, or of `every` one, was issued."""

    @abc.abstractmethod
    def has_arrived(self, slot: int) -> bool:
        """Whether the last upload into a slot has ended. (lock)"""

    @abc.abstractmethod
    def end_events(self, slots: Sequence[int]) -> list[StreamEvent]:
        """Return the events that a computation with these slots must wait for. (lock)"""

    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether every upload that is possible now was issued or requested. (lock)"""

    @abc.abstractmethod
    def wait_idle(self) -> None:
        """Block until every upload that is possible now was issued."""

    @abc.abstractmethod
    def withdraw_replicas(self) -> None:
        """Block until no copy is issued any more from replicas that are no longer lent: the rest of
        their uploads comes from host memory."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the thread and release the slots' memory."""

    def release(self, slots: Sequence[int], used: StreamEvent) -> None:
        """Set the last reader of these slots: the computation that ends at `used`. (lock)"""
        for number in slots:
            slot = self.slots[number]
            slot.free, slot.used = used, True

    def was_used(self, slot: int) -> bool:
        """Whether a computation has read the slot since its upload. (lock)"""
        return self.slots[slot].used

    def set_overlap(self, overlap: bool) -> None:
        """Turn overlap of copies on or off; without it one copy is in flight at a time."""
        self._overlap = overlap

    def _awaits_remote(self, targets: Sequence[Target]) -> bool:
        """Whether another rank is updating an expert that is wanted: it cannot wake a thread of
        this process. (lock)"""
        return any(isinstance(t.entry, RemoteExpert) and not t.entry.readable for t in targets)

    def in_flight_limit(self, certain: bool) -> int:
        """Return the bytes that may be in flight when another piece is issued."""
        if not self._overlap:
            return 0
        return self._certain_in_flight if certain else self.piece_bytes


def upload_label(entry: Entry, reason: str) -> str:
    return f"expert {entry.id.layer}.{entry.id.index} {reason}".rstrip()
