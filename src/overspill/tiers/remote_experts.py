"""Experts that other ranks own, and that this rank can upload from their memory."""

from collections.abc import Mapping, Sequence

from torch import Tensor

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
    """The remote experts of each layer, in the order of their ids. There are none by default."""

    def __init__(
        self,
        n_layers: int,
        found: Mapping[ExpertId, RemoteExpert] | None = None,
        slabs: Sequence[HostSlab] = (),
        first: int = 0,
    ) -> None:
        """`found` has the same ids in each layer, `slabs` their weights; `first` is the number of
        the first entry."""
        found = found or {}
        self.ids = tuple(sorted({id.index for id in found}))
        self.slabs = slabs
        self._layers = [
            [found[ExpertId(layer, id)] for id in self.ids] for layer in range(n_layers)
        ]
        self.entries = [remote for layer in self._layers for remote in layer]
        for number, remote in enumerate(self.entries, first):
            remote.number = number

    @classmethod
    def of_ranks(
        cls, shared: SharedExperts, n_layers: int, first: int, pinned: bool
    ) -> "RemoteExperts":
        """The experts of all other ranks."""
        slabs: list[HostSlab] = []
        found: dict[ExpertId, RemoteExpert] = {}
        try:
            for rank, (memory, part) in enumerate(zip(shared.memories, shared.parts, strict=True)):
                if rank == shared.rank:
                    continue
                slab = HostSlab(
                    "weights of other ranks",
                    memory.sizes.experts,
                    memory.sizes.weight_bytes,
                    pinned,
                    background=True,
                    memory=memory.weights,
                )
                slabs.append(slab)
                for layer in range(n_layers):
                    for position, expert in enumerate(part.local_ids):
                        id, index = ExpertId(layer, expert), layer * part.n_local + position
                        found[id] = RemoteExpert(id, memory, slab, index)
        except BaseException:
            for slab in slabs:
                slab.close()
            raise
        return cls(n_layers, found, slabs, first)

    def expect(self, layer: int, versions: Sequence[int]) -> None:
        """Set the versions of a layer's remote experts for a pass, under the store's lock.
        `versions` are those that the owners have published, by expert id."""
        for remote in self._layers[layer]:
            remote.version = versions[remote.id.index]

    def of(self, layer: int) -> Sequence[RemoteExpert]:
        return self._layers[layer]

    def close(self) -> None:
        for slab in self.slabs:
            slab.close()
