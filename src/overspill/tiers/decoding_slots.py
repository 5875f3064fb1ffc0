"""Host slots of the experts that a decoding step needs."""

from collections.abc import Collection, Iterable, Sequence

from overspill.tiers.entry import Entry, Part
from overspill.tiers.store import ExpertStore


class DecodingSlots:
    """A part of the store; its methods take the store's lock."""

    def __init__(self, store: ExpertStore) -> None:
        self._sync = store.sync
        self._disk = store.disk
        self._places = store.places

    def hold(
        self,
        entries: Sequence[Entry],
        order: Sequence[Entry] | None = None,
        ahead: Collection[Entry] = (),
    ) -> list[Entry] | None:
        """Keep these experts in host slots until `release`, without other transfers. Returns the
        experts whose weights must be read there now, before `end_reads`; None if one of the
        experts, or too many others, are being read, written, updated or uploaded. Experts of
        `ahead` may still be read. The first ones in `order` lose their slots; by default the least
        recently used."""
        with self._sync.lock:
            self._sync.raise_error()
            if any(entry.stale or (entry.io and entry not in ahead) for entry in entries):
                return None
            for entry in entries:
                entry.holds += 1
                self._places.touch(entry)
            missing = [e for e in entries if not (e.valid | e.io) & Part.WEIGHTS]
            for entry in missing:
                if entry.host_slot is None and not self._places.assign_host_slot(entry, (), order):
                    self.release(entries)
                    self._write_oldest()
                    return None
            for entry in missing:
                entry.io |= Part.WEIGHTS
            return missing

    def begin_reads(
        self, entries: Iterable[Entry], order: Sequence[Entry], keep: Iterable[Entry] = ()
    ) -> list[Entry]:
        """Give host slots to experts that will be needed, as far as other experts in `order` can
        leave theirs; experts to `keep` do not. Returns the experts whose weights are to be read
        now, before `end_reads`."""
        needed = {*entries, *keep}
        with self._sync.lock:
            found: list[Entry] = []
            for entry in entries:
                if not entry.on_disk or entry.io or entry.stale or entry.readable:
                    continue
                if entry.host_slot is None and not self._places.assign_host_slot(
                    entry, needed, order
                ):
                    break
                entry.io |= Part.WEIGHTS
                found.append(entry)
            return found

    def _write_oldest(self) -> None:
        """Write an expert whose host slot is not used to disk, if it is newer there: the stager
        keeps experts that the next pass needs."""
        for entry in self._places.cached():
            if entry.dirty and not entry.io and not entry.holds:
                self._disk.write_back(entry)
                return

    def end_reads(self, entries: Iterable[Entry], succeeded: bool = True) -> None:
        with self._sync.lock:
            for entry in entries:
                entry.io &= ~Part.WEIGHTS
                if succeeded:
                    entry.valid |= Part.WEIGHTS
            if self._sync.main_waits:  # it may be for one of them, or for its slot
                self._disk.request_transfers()
                self._sync.wake_all()

    def release(self, entries: Iterable[Entry]) -> None:
        with self._sync.lock:
            for entry in entries:
                entry.holds -= 1
            if self._sync.main_waits:  # a pass of another thread whose experts have lost slots
                self._disk.request_transfers()
