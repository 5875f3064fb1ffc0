"""An uploader that issues copies from a Python thread, on every device and from every tier."""

import threading
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from overspill.tiers.entry import Entry, Part
from overspill.tiers.store import ExpertStore
from overspill.transfer.streams import COMPLETED, CopyStream, StreamEvent
from overspill.transfer.uploader import REPLICAS, PieceSizes, Target, Uploader, upload_label


class _Partial:
    """A record of which some pieces were issued."""

    __slots__ = ("entry", "filled", "version")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.version = entry.version
        self.filled = 0


class ThreadUploader(Uploader):
    """A slot's `entry` is set once its upload was issued completely."""

    def __init__(
        self,
        store: ExpertStore,
        slab: Tensor,
        stream: CopyStream,
        n_slots: int,
        sizes: PieceSizes | None = None,
    ) -> None:
        super().__init__(slab, n_slots, sizes or PieceSizes(), store.weight_bytes)
        self._store = store
        self._sync = store.sync
        self._stream = stream
        self._wanted: Sequence[Target] = ()
        self._missing: deque[Target] = deque()  # targets that were not issued yet
        self._owners: dict[int, Entry] = {}  # the expert that belongs in each slot
        self._partial: dict[int, _Partial] = {}
        self._in_flight: deque[tuple[StreamEvent, int]] = deque()
        self._views = slab.unbind()  # a view takes longer to make than a copy to issue
        self._busy = False
        self._reads_replica = False  # a piece is being issued from a replica
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="overspill-uploader", daemon=True)
        self._thread.start()

    def set_targets(self, targets: Sequence[Target]) -> None:
        owners = self._owners | {target.slot: target.entry for target in targets}
        missing = self._not_issued(targets)
        if missing:
            self._sync.wake_uploader()  # it gets the lock after this
        # at once: with only some of it, the thread would go wrong after an interrupt
        self._wanted, self._owners, self._missing = targets, owners, missing

    def is_issued(self, entry: Entry, slot: int) -> bool:
        place = self.slots[slot]
        return place.entry is entry and place.version == entry.version

    def wait_issued(self, pairs: Sequence[tuple[Entry, int]], every: bool) -> None:
        enough = all if every else any
        labels = ", ".join(upload_label(entry, "") for entry, _ in pairs[:3])

        def ready() -> bool:
            issued = [self.is_issued(*pair) for pair in pairs]
            missing = (entry for (entry, _), done in zip(pairs, issued, strict=True) if not done)
            self._store.disk.check_readable(missing)
            return enough(issued)

        self._sync.wait(ready, f"the upload of {labels} (uploader thread)")

    def has_arrived(self, slot: int) -> bool:
        place = self.slots[slot]
        if place.ready is not COMPLETED and place.ready.done():
            place.ready = COMPLETED
        return place.ready is COMPLETED

    def end_events(self, slots: Sequence[int]) -> list[StreamEvent]:
        ready = (self.slots[slot].ready for slot in slots)
        return [event for event in ready if event is not COMPLETED]

    def idle(self) -> bool:
        return self._closed or (not self._busy and self._next() is None)

    def wait_idle(self) -> None:
        self._sync.wait(self.idle, "pending uploads (uploader thread)")

    def withdraw_replicas(self) -> None:
        # pieces are issued without the lock, from the source that was found under it
        what = "a copy from a replica (uploader thread)"
        self._sync.wait(lambda: self._closed or not self._reads_replica, what)

    def close(self) -> None:
        with self._sync.lock:
            self._closed = True
            self._sync.wake_uploader()
        if self._thread is not threading.current_thread():  # a finalizer may run in any thread
            self._thread.join()
        self.slab, self._views = self.slab.new_empty(0), ()

    def _not_issued(self, targets: Sequence[Target]) -> deque[Target]:
        return deque(t for t in targets if not self.is_issued(t.entry, t.slot))

    def _next(self) -> Target | None:
        found = self._first_readable()
        if found is None and self._wanted:
            # an expert that was there may have been updated since
            self._missing = self._not_issued(self._wanted)
            found = self._first_readable()
        return found

    def _first_readable(self) -> Target | None:
        while self._missing and self.is_issued(self._missing[0].entry, self._missing[0].slot):
            self._missing.popleft()
        for target in self._missing:
            if self._store.replicas.can_upload(target.entry) and not self.is_issued(
                target.entry, target.slot
            ):
                return target
        return None

    def _run(self) -> None:
        try:
            while True:
                with self._sync.lock:
                    self._busy = False
                    target = self._wait_for_target()
                    if target is None:
                        return
                    oldest = self._oldest_if_full(target)
                    if oldest is None:
                        self._busy = True
                        piece, source, after = self._begin(target)
                if oldest is not None:
                    oldest.wait()  # then look again: another upload may be more urgent
                else:
                    self._issue(target, piece, source, after)
                    del source  # a replica may be given back while this thread waits
        except BaseException as error:  # the main thread waits for uploads
            self._sync.fail(error)

    def _wait_for_target(self) -> Target | None:
        """Wait for the next upload; return None if the uploader is closed. (lock)"""
        target = None if self._closed else self._next()
        if target is None:
            self._sync.wake_main()  # it may wait for the uploader to be idle
        while target is None and not self._closed:
            self._sync.wait_uploader(self._awaits_remote(self._wanted))
            target = self._next()
        return None if self._closed else target

    def _oldest_if_full(self, target: Target) -> StreamEvent | None:
        """Return the end of the oldest copy if too many bytes are in flight to issue another."""
        limit = self.in_flight_limit(target.certain)
        while self._in_flight and self._in_flight[0][0].done():
            self._in_flight.popleft()
        if sum(size for _, size in self._in_flight) > limit:
            return self._in_flight[0][0]
        return None

    def _begin(self, target: Target) -> tuple[slice, Tensor, list[StreamEvent]]:
        """Return the bytes of the record to copy next, their source, and the events to wait for.
        (lock)"""
        entry, slot = target.entry, self.slots[target.slot]
        slot.entry = None  # no computation may use the slot from here on
        partial = self._partial.get(target.slot)
        if partial is None or partial.entry is not entry or partial.version != entry.version:
            partial = self._partial[target.slot] = _Partial(entry)
        replica = self._store.replicas.of(entry)
        self._reads_replica = replica is not None
        if replica is None:
            self._store.begin_upload(entry)
        record = self.weight_bytes[entry.id.layer]
        size = record if target.certain else self.piece_bytes
        piece = slice(partial.filled, min(partial.filled + size, record))
        source = self._store.host(entry, Part.WEIGHTS) if replica is None else replica
        if piece.stop - piece.start != self.record_bytes:
            source = source[piece]
        # the first piece waits for the last computation that reads the slot
        return piece, source, [slot.free] if piece.start == 0 else []

    def _issue(
        self, target: Target, piece: slice, source: Tensor, after: list[StreamEvent]
    ) -> None:
        entry, slot = target.entry, self.slots[target.slot]
        version = self._partial[target.slot].version
        destination = self._views[target.slot]
        if source.nbytes != self.record_bytes:
            destination = destination[piece]
        from_host = not self._reads_replica
        label = upload_label(entry, target.reason)
        counter = self._stream.name if from_host else REPLICAS
        event = self._stream.copy([(destination, source)], label, after=after, counter=counter)
        with self._sync.lock:
            self._reads_replica = False
            if from_host:
                self._store.end_upload(entry, event)
            self._partial[target.slot].filled = piece.stop
            if piece.stop == self.weight_bytes[entry.id.layer]:
                del self._partial[target.slot]
                if self._owners[target.slot] is entry:
                    slot.entry, slot.version, slot.ready = entry, version, event
                    slot.used = False
                self._sync.wake_main()
            elif not from_host:
                self._sync.wake_main()
        if from_host and entry.disk_slot is not None:
            event.wait()  # the host slot can be reused now, and nothing else would say so
            self._store.upload_done(entry)
        self._in_flight.append((event, source.nbytes))
