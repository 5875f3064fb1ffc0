"""The entry of an expert in the store: its slots and the state of its parts."""

from enum import IntFlag
from typing import Protocol

from overspill.core.experts import ExpertId


class Part(IntFlag):
    """The parts of an expert, each in a slab and a record file of its own."""

    WEIGHTS = 1
    STATES = 2
    GRADS = 4


class Reader(Protocol):
    """A copy out of a host slot that may still be running."""

    def done(self) -> bool: ...


class Entry:
    """The slots of one expert and the state of its parts. Fields are read under the store's lock
    and changed by the store only."""

    __slots__ = (
        "copy",
        "dirty",
        "disk_slot",
        "holds",
        "host_slot",
        "id",
        "io",
        "number",
        "stale",
        "upload",
        "valid",
        "version",
    )

    def __init__(
        self, id: ExpertId, number: int, host_slot: int | None, disk_slot: int | None
    ) -> None:
        self.id = id  # the expert at this position, for names in traces and errors
        self.number = number  # layer * number of local experts + local position
        self.host_slot = host_slot  # None: only on disk
        self.disk_slot = disk_slot  # None: always in host memory
        self.valid = Part(0)  # parts that are current in the host slot; none without one
        self.dirty = Part(0)  # parts that are newer in the host slot than on disk
        self.io = Part(0)  # parts being read or written
        self.stale = False  # the gradient is complete, the update is not: do not read the weights
        self.holds = 0  # users that need the expert to keep its host slot
        self.version = 0  # of the weights; a GPU slot with another version is out of date
        self.upload: Reader | None = None  # the last copy that reads the host slot
        self.copy: Reader | None = None  # the same for decoding steps, beside uploads of a pass

    @property
    def on_disk(self) -> bool:
        """Whether the expert has a disk slot; its host slot, if any, is one of the cache."""
        return self.disk_slot is not None

    @property
    def readable(self) -> bool:
        """Whether the current weights are in a host slot."""
        return not self.stale and self.host_slot is not None and bool(self.valid & Part.WEIGHTS)

    @property
    def evictable(self) -> bool:
        """Whether the host slot can be given to another expert."""
        if self.dirty or self.io or self.holds:
            return False
        if self.copy is not None and not self.copy.done():
            return False
        return self.upload is None or self.upload.done()
