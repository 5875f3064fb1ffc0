"""Experts that move between the compute device and host memory or disk."""

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from overspill.tiers.entry import Entry, Part
from overspill.tiers.store import ExpertStore


class ResidentChanges:
    """A part of the store; its methods take the store's lock. Used while nothing is transferred."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._sync = store.sync
        self._places = store.places

    def missing_slots(self, leaving: Collection[Entry]) -> int:
        """The number of host slots that must be added before these experts can leave the device."""
        with self._sync.lock:
            count = sum(entry.number not in self._places.homes for entry in leaving)
            to_host = count - len(self._places.free_records)
            missing = to_host + self._places.least_cache - len(self._places.free_slots)
            return max(0, missing) if to_host > 0 else 0

    def extend_host(self, count: int) -> None:
        """Add host slots."""
        with self._sync.lock:
            slots = self._places.host_slots + count
            self._store.memory.extend(slots)
            self._places.free_slots += range(self._places.host_slots, slots)
            self._places.host_slots = slots

    def empty_cache(self) -> None:
        """Take experts on disk out of their host slots."""
        with self._sync.lock:
            for entry in list(self._places.cached()):
                self._store.disk.write_back(entry)
                self._places.evict(entry)

    def leave_host(self, layer: int, count: int) -> None:
        """Make the first `count` experts of a layer resident: free their host slots and disk
        slots."""
        with self._sync.lock:
            self._places.residents[layer] = count
            self._places.recount_slots()

    def enter_host(self, entry: Entry, fills: Mapping[Part, Callable[[Tensor], None]]) -> None:
        """Give the last resident expert of a layer a host slot or a disk slot; `fills` write its
        parts."""
        store, places, layer = self._store, self._places, entry.id.layer
        with self._sync.lock:
            assert places.position(entry) == places.residents[layer] - 1
            home = places.homes.get(entry.number)
            # experts on disk need some
            in_host = len(places.free_slots) > places.least_cache if home is None else home.in_host
            free = places.free_slots if in_host else places.free_records
            slot = free[-1] if home is None else home.slot
            for part, fill in fills.items():
                if in_host:
                    size = store.memory.size_in(part, layer)
                    fill(store.memory.slabs[part][slot][:size])
                else:
                    store.memory.write(part, slot, layer, fill)
            if in_host:
                entry.host_slot, entry.valid = slot, Part(sum(store.memory.slabs))
            else:
                entry.disk_slot = slot
            entry.version += 1
            places.residents[layer] -= 1  # until now it was on the device, whatever came
            if home is None:
                free.pop()

    def load_weights(self, entry: Entry) -> Tensor:
        """Return the weights in the expert's host slot, which an expert on disk gets now."""
        store = self._store
        with self._sync.lock:
            if not entry.readable:
                if entry.host_slot is None and not self._places.assign_host_slot(entry, ()):
                    self.empty_cache()  # what is not yet on disk is written now
                    self._places.assign_host_slot(entry, ())
                assert entry.disk_slot is not None
                memory = store.host(entry, Part.WEIGHTS)
                store.memory.files[Part.WEIGHTS].read(entry.disk_slot, memory)
                entry.valid |= Part.WEIGHTS
            return store.host(entry, Part.WEIGHTS)

    def swap(self, resident: Entry, streamed: Entry, copy: Callable[[], None]) -> None:
        """Swap two experts of a layer, one resident and one in a host slot: `copy` swaps their
        weights. If it raises, the caller has the old weights."""
        places, layer = self._places, resident.id.layer
        with self._sync.lock:
            new = places.maps[layer].swapped(places.position(resident), places.position(streamed))
            streamed.version += 1  # the copy on the GPU is out of date
            if streamed.on_disk:
                streamed.dirty |= Part.WEIGHTS
            copy()
            places.maps[layer] = new
            resident.id, streamed.id = streamed.id, resident.id
