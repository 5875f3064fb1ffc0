"""Copies of experts on the compute device, from which uploads are made in place of host memory."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from overspill.tiers.entry import Entry


class Replica(NamedTuple):
    """The weight record of an expert in memory of the compute device."""

    memory: Tensor
    version: int


class Replicas:
    """The replicas that uploads may read at present. Used under the store's lock."""

    def __init__(self) -> None:
        self.lent: Mapping[int, Replica] = {}
        """By the number of an entry. Their memory does not change while they are lent."""

    def of(self, entry: Entry) -> Tensor | None:
        """The replica of an expert; None without one of its current weights."""
        found = self.lent.get(entry.number)
        if found is None or found.version != entry.version or entry.stale:
            return None
        return found.memory

    def can_upload(self, entry: Entry) -> bool:
        """Whether the current weights are in host memory or in a replica."""
        return entry.readable or self.of(entry) is not None
