"""The place of each expert (compute device, host slot or disk), and the free slots."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId
from overspill.tiers.entry import Entry, Part
from overspill.tiers.remote_experts import RemoteExperts
from overspill.tiers.worker_sync import WorkerSync


class Home(NamedTuple):
    """A permanent host slot or a disk record that no other expert uses."""

    in_host: bool
    slot: int


class ExpertPlaces:
    """The entries of all local experts, and the slots of streamed ones.

    The first `residents[layer]` experts of each layer live on the compute device and have no slots
    here. Of the others, `permanent_slots`, spread evenly over the layers, always stay in host
    memory; the rest is on disk and passes through `cache_slots` further host slots.

    Slots have the size of the largest records, and any expert can use them. But experts whose
    records are smaller have homes of their own size, to which they return from the device.
    """

    def __init__(
        self,
        sync: WorkerSync,
        n_layers: int,
        experts: ExpertMap,
        permanent_slots: int,
        cache_slots: int,
        residents: list[int] | None,
        spare_records: int,
        small_layers: Collection[int] = (),
    ) -> None:
        """If there are experts on disk, `spare_records` further ones find room there. Records of
        `small_layers` are smaller than the largest."""
        self._sync = sync
        self.experts = experts
        self.maps = [experts] * n_layers
        """The expert at each position of each layer."""
        self.n_layers = n_layers
        self.residents = residents if residents is not None else [0] * n_layers
        """The number of resident experts of each layer: the first ones."""
        count = n_layers * experts.n_local - sum(self.residents)
        self.permanent_slots = min(permanent_slots, count)
        on_disk = count - self.permanent_slots
        self.disk_slots = on_disk + spare_records if on_disk else 0
        self.least_cache = min(cache_slots, on_disk)
        """Host slots that experts on disk need."""
        assert self.disk_slots == 0 or self.least_cache >= 1
        self.host_slots = self.permanent_slots + self.least_cache
        self.entries = self._number_entries(count)
        self.homes: dict[int, Home] = {}
        """By the numbers of entries."""
        for entry in self.entries if small_layers else ():
            slot = entry.host_slot if entry.disk_slot is None else entry.disk_slot
            if entry.id.layer in small_layers and slot is not None:
                self.homes[entry.number] = Home(entry.disk_slot is None, slot)
        self.remote_experts = RemoteExperts(n_layers)
        """Experts of other ranks that this one can upload. They are no `entries`."""
        self._cached: dict[Entry, None] = {}
        self.recount_slots()

    def _number_entries(self, streamed: int) -> list[Entry]:
        entries, in_host, on_disk = [], 0, 0
        for number in range(self.n_layers * self.experts.n_local):
            layer, position = divmod(number, self.experts.n_local)
            id = ExpertId(layer, self.experts.global_id(position))
            if position < self.residents[layer]:
                entries.append(Entry(id, number, None, None))
            # evenly spread, so that the disk is read at a steady rate through a step
            elif (in_host + on_disk + 1) * self.permanent_slots // streamed > in_host:
                entries.append(Entry(id, number, in_host, None))
                in_host += 1
            else:
                entries.append(Entry(id, number, None, on_disk))
                on_disk += 1
        return entries

    # -- lookup ---------------------------------------------------------------------------

    def entry(self, id: ExpertId) -> Entry:
        return self.at(id.layer, self.maps[id.layer].position(id.index))

    def id_of(self, number: int) -> ExpertId:
        """The expert that is at a position now, by the number of its entry."""
        layer, position = divmod(number, self.experts.n_local)
        return ExpertId(layer, self.maps[layer].global_id(position))

    def at(self, layer: int, position: int) -> Entry:
        n_local = self.experts.n_local
        if position >= n_local:
            return self.remote_experts.of(layer)[position - n_local]
        return self.entries[layer * n_local + position]

    def numbered(self, number: int) -> Entry:
        """The expert, or remote expert, with a number."""
        if number < len(self.entries):
            return self.entries[number]
        return self.remote_experts.entries[number - len(self.entries)]

    @property
    def computed(self) -> list[ExpertMap]:
        """The expert at each position of each layer, for passes: the local experts, then the remote
        ones."""
        if not self.remote_experts.ids:
            return self.maps  # itself: experts may be swapped
        ids = self.experts.local_ids + self.remote_experts.ids
        return [ExpertMap(self.experts.n_global, ids)] * self.n_layers

    def layer_entries(self, layer: int) -> list[Entry]:
        first = layer * self.experts.n_local
        return self.entries[first : first + self.experts.n_local]

    def streamed(self, layer: int) -> list[Entry]:
        """The experts of a layer that are not resident."""
        return self.layer_entries(layer)[self.residents[layer] :]

    def position(self, entry: Entry) -> int:
        """The position of an expert, or remote expert, in its layer."""
        n_local, remote = self.experts.n_local, entry.number - len(self.entries)
        if remote < 0:
            return entry.number % n_local
        return n_local + remote % len(self.remote_experts.ids)

    # -- slots ----------------------------------------------------------------------------

    @property
    def in_host(self) -> int:
        """The number of experts that always stay in host memory."""
        return sum(e.host_slot is not None and not e.on_disk for e in self.entries)

    @property
    def on_disk(self) -> int:
        """The number of experts on disk."""
        return sum(entry.on_disk for entry in self.entries)

    @property
    def cache_slots(self) -> int:
        """The number of host slots that the experts on disk share."""
        return len(self.free_slots) + len(self._cached)

    def cached(self) -> Iterable[Entry]:
        """The experts on disk that have a host slot. Called under the lock."""
        return self._cached

    def disk_busy(self) -> bool:
        """Whether a part of an expert is being read or written. Called under the lock."""
        return any(entry.io for entry in self._cached)

    def touch(self, entry: Entry) -> None:
        """Note that the expert is needed, for the choice of the least recently used."""
        with self._sync.lock:
            if entry in self._cached:
                del self._cached[entry]
                self._cached[entry] = None

    def assign_host_slot(
        self, entry: Entry, needed: Collection[Entry], order: Iterable[Entry] | None = None
    ) -> bool:
        """Give the expert a host slot: a free one, or that of the least recently used expert, or
        the first in `order`, that is not among the `needed` and not in use. False if there is
        none."""
        with self._sync.lock:
            assert entry.host_slot is None
            if not self.free_slots:
                held = self._cached if order is None else (e for e in order if e in self._cached)
                idle = (each for each in held if each not in needed and each.evictable)
                first = next(idle, None)
                if first is None:
                    return False
                self.evict(first)
            entry.host_slot = self.free_slots.pop()
            entry.valid = Part(0)
            self._cached[entry] = None
            return True

    def evict(self, entry: Entry) -> None:
        """Take the host slot of an expert on disk. Called under the lock."""
        assert entry.host_slot is not None
        self.free_slots.append(entry.host_slot)
        entry.host_slot, entry.valid = None, Part(0)
        entry.upload = entry.copy = None
        del self._cached[entry]

    def recount_slots(self) -> None:
        """Derive the free slots from the entries: at the beginning and after an interrupt."""
        with self._sync.lock:
            for layer, count in enumerate(self.residents):
                for entry in self.layer_entries(layer)[:count]:
                    entry.host_slot = entry.disk_slot = None
                    entry.upload = entry.copy = None
                    entry.valid = entry.dirty = Part(0)
            in_host = [entry for entry in self.entries if entry.host_slot is not None]
            on_disk = [entry for entry in self.entries if entry.on_disk]
            held = {entry.host_slot for entry in in_host}
            # experts on disk that have a host slot, the least recently used first
            cached = {entry for entry in in_host if entry.on_disk}
            known = [entry for entry in self._cached if entry in cached]
            self._cached = dict.fromkeys([*known, *cached])
            stored = {entry.disk_slot for entry in on_disk}
            for home in self.homes.values():
                (held if home.in_host else stored).add(home.slot)
            self.free_slots = [slot for slot in range(self.host_slots) if slot not in held]
            self.free_records = [n for n in range(self.disk_slots) if n not in stored]

    def check_conserved(self) -> None:
        """Asserts, when idle, that every host slot is either free or held by exactly one expert:
        that whose home it is, if it is one."""
        with self._sync.lock:
            held = [entry.host_slot for entry in self.entries if entry.host_slot is not None]
            stored = [entry.disk_slot for entry in self.entries if entry.disk_slot is not None]
            for number, (in_host, slot) in self.homes.items():
                entry = self.entries[number]
                if self.position(entry) < self.residents[entry.id.layer]:
                    (held if in_host else stored).append(slot)
                else:
                    assert slot == (entry.host_slot if in_host else entry.disk_slot)
            slots = sorted([*held, *self.free_slots])
            assert slots == list(range(self.host_slots)), "host slots leaked"
            records = sorted([*stored, *self.free_records])
            assert records == list(range(self.disk_slots)), "disk slots leaked"
            assert not any(entry.io or entry.holds for entry in self.entries), "not idle"
