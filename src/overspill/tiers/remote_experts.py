"""Experts that other ranks own, and that this rank can upload from their memory."""

from collections.abc import Sequence

from torch import Tensor

from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId
from overspill.tiers.entry import Entry
from overspill.tiers.shared_experts import RankMemory, SharedExperts
from overspill.tiers.slab import HostSlab


class RemoteExpert(Entry):
    """The entry of an expert of another rank. `version` is the one that its owner has published for
    the current pass; the weights are current when the owner's word shows it."""

    __slots__ = ("_index", "_owner", "_slab")

    def __init__(self, id: ExpertId, owner: RankMemory, slab: HostSlab, index: int) -> None:
        """`slab`, in the memory of the owner, has the weights in slot `index`."""
        super().__init__(id, -1, None, None)  # it gets its number with all others
        self._owner = owner
        self._slab = slab
        self._index = index

    @property
    def weights(self) -> Tensor:
        return self._slab[self._index]

    @property
    def readable(self) -> bool:
        return bool(self._owner.versions[self._index] == self.version)


class RemoteExperts:
    """The remote experts of each layer, in the order of their ids."""

    def __init__(self, shared: SharedExperts, n_layers: int, first: int, pinned: bool) -> None:
        """`first` is the number of the first entry."""
        own, parts = shared.parts[shared.rank], shared.parts
        self.ids = tuple(id for id in range(own.n_global) if id not in own.local_ids)
        self.slabs: list[HostSlab] = []
        found: dict[ExpertId, RemoteExpert] = {}
        try:
            for rank, (memory, part) in enumerate(zip(shared.memories, parts, strict=True)):
                if rank != shared.rank:
                    self._add(found, memory, part, n_layers, pinned)
        except BaseException:
            self.close()
            raise
        self._layers: list[list[RemoteExpert]] = []
        for layer in range(n_layers):
            self._layers.append([found[ExpertId(layer, id)] for id in self.ids])
        self.entries = [remote for layer in self._layers for remote in layer]
        for number, remote in enumerate(self.entries, first):
            remote.number = number

    def _add(
        self,
        found: dict[ExpertId, RemoteExpert],
        memory: RankMemory,
        part: ExpertMap,
        n_layers: int,
        pinned: bool,
    ) -> None:
        sizes = memory.sizes
        slab = HostSlab(
            "weights of other ranks",
            sizes.experts,
            sizes.weight_bytes,
            pinned,
            background=True,
            memory=memory.weights,
        )
        self.slabs.append(slab)
        for layer in range(n_layers):
            for position, expert in enumerate(part.local_ids):
                id = ExpertId(layer, expert)
                found[id] = RemoteExpert(id, memory, slab, layer * part.n_local + position)

    def expect(self, layer: int, versions: Sequence[int]) -> None:
        """Sets the versions of a layer's remote experts for a pass, under the store's lock.
        `versions` are those that the owners have published, by expert id."""
        for remote in self._layers[layer]:
            remote.version = versions[remote.id.index]

    def of(self, layer: int) -> Sequence[RemoteExpert]:
        return self._layers[layer]

    def close(self) -> None:
        for slab in self.slabs:
            slab.close()
