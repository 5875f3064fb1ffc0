"""The loader fills the slots of the compute device. It is told which expert belongs in which slot,
in the order of need, and copies each one as soon as its record is ready in host memory.

This one does it by a thread of its own, on any device and from any tier; `PortedLoader` has a
native one do it where that is possible.

A copy that was issued cannot be taken back, so few guesses are. The record of an expert that is
only expected to be needed goes in four pieces; while one is being copied the next is queued behind
it, which keeps the link busy, and nothing is issued beyond that. Before each piece the loader looks
again at what is needed most: an upload that became urgent waits for one copy of a record at most,
and the one that it overtakes goes on afterwards. What is needed for sure is queued further ahead.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from overspill.core.sizes import round_up
from overspill.tiers.layout import ALIGN
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.transfer.lanes import PASSED, Lane, Mark

_PIECE = 4 << 20
"""Bytes of a copy from which on the link is fully used."""
_SURE_BYTES = 128 << 20
"""Bytes on their way of what is needed for sure: the less often the loader has to wake, the
better."""


class Target(NamedTuple):
    """An expert and the slot it belongs in; `why` it is expected there tells the timeline. `sure`:
    nothing more urgent can come before it is needed."""

    entry: Entry
    slot: int
    why: str = ""
    sure: bool = False


class Slot:
    """One record's room on the compute device. Guarded by the store's lock."""

    __slots__ = ("filled", "free", "holds", "ready", "source", "target", "used", "version")

    def __init__(self) -> None:
        self.target: Entry | None = None  # who belongs here
        self.holds: Entry | None = None  # whose upload was issued, all of it
        self.source: Entry | None = None  # whose upload has begun, …
        self.filled = 0  # … and how many bytes of it were issued
        self.version = -1  # of the weights that were uploaded
        self.ready: Mark = PASSED  # end of that upload
        self.free: Mark = PASSED  # end of the last computation that read the slot
        self.used = False  # whether there was one since the upload


class Loader:
    """Carries out uploads. `set_targets` replaces the list; what had not started is dropped."""

    def __init__(self, store: ExpertStore, slab: Tensor, lane: Lane, n_slots: int) -> None:
        self.store = store
        self.slab = slab
        self.lane = lane
        self.overlap = True  # off: one copy at a time, as the sequential twin
        self.slots = [Slot() for _ in range(n_slots)]
        self.row_read: Callable[[], None] | None = None  # told when a disk expert's row was read
        self._wanted: Sequence[Target] = ()
        self._targets: deque[Target] = deque()  # those of them that are not there yet
        self._in_flight: deque[tuple[Mark, int]] = deque()
        self._rows = slab.unbind()  # views take longer to make than to copy from
        self._record = slab.shape[1]
        self._piece = max(_PIECE, round_up(self._record // 4, ALIGN))
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="overspill-loader", daemon=True)
        self._thread.start()

    def fresh(self, entry: Entry, slot: int) -> bool:
        """Whether the upload of the expert's current weights into `slot` has been issued."""
        place = self.slots[slot]
        return place.holds is entry and place.version == entry.version

    def await_issued(self, pairs: Sequence[tuple[Entry, int]], every: bool) -> None:
        """Blocks until the upload of one of these experts into its slot, or of `every` one, has
        been issued."""
        enough = all if every else any
        with self.store.lock:
            self.store.wait_main(lambda: enough(self.fresh(*pair) for pair in pairs))

    def ends(self, slots: Sequence[int]) -> list[Mark]:
        """Under the lock: what to wait for before computing with these slots."""
        ready = (self.slots[slot].ready for slot in slots)
        return [mark for mark in ready if mark is not PASSED]

    def settle(self) -> None:
        """Blocks until every upload that can be issued has been."""
        with self.store.lock:
            self.store.wait_main(self.idle)

    def arrived(self, slot: int) -> bool:
        """Under the lock: whether the last upload into a slot has ended."""
        place = self.slots[slot]
        if place.ready is not PASSED and place.ready.done():
            place.ready = PASSED  # nobody need ask again
        return place.ready is PASSED

    def set_targets(self, targets: Sequence[Target]) -> None:
        """Under the lock: what belongs where from now on, most urgent first."""
        self._wanted = targets
        for target in targets:
            self.slots[target.slot].target = target.entry
        self._look_again()
        if self._targets:
            self.store.wake_loader.notify()

    def _look_again(self) -> None:
        self._targets = deque(t for t in self._wanted if not self.fresh(t.entry, t.slot))

    def idle(self) -> bool:
        """Under the lock: whether every upload that can be issued has been."""
        return not self._busy and self._next() is None

    def _next(self) -> Target | None:
        found = self._first_ready()
        if found is None and self._wanted:
            self._look_again()  # what was there may have been updated since
            found = self._first_ready()
        return found

    def _first_ready(self) -> Target | None:
        while self._targets and self.fresh(self._targets[0].entry, self._targets[0].slot):
            self._targets.popleft()
        for target in self._targets:
            entry = target.entry
            if entry.readable and not self.fresh(entry, target.slot):
                return target
        return None

    def _run(self) -> None:
        try:
            while True:
                with self.store.lock:
                    self._busy = False
                    target = self._await_target()
                    if target is None:
                        return
                    before = self._crowded(target)
                    if before is None:
                        self._busy = True
                        piece = self._begin(target)
                if before is not None:
                    before.wait()  # and look again: something else may be needed most by then
                else:
                    self._issue(target, *piece)
        except BaseException as error:  # a dead loader must not leave the main thread waiting
            self.store.fail(error)

    def _await_target(self) -> Target | None:
        """Under the lock: what to upload next; None if the loader is closed."""
        target = self._next()
        if target is None:
            self.store.wake_main.notify_all()  # it may wait for everything to rest
        while target is None and not self._closed:
            self.store.wake_loader.wait()
            target = self._next()
        return None if self._closed else target

    def _crowded(self, target: Target) -> Mark | None:
        """The end of the oldest copy if too much is on its way to issue another. In front of a
        guess there is just one piece: enough to keep the link busy."""
        limit = self._limit(target.sure)
        while sum(size for _, size in self._in_flight) > limit:
            if not self._in_flight[0][0].done():
                return self._in_flight[0][0]
            self._in_flight.popleft()
        return None

    def _limit(self, sure: bool) -> int:
        """How many bytes may be on their way when another copy is issued."""
        if not self.overlap:
            return 0
        return max(self._piece, _SURE_BYTES) if sure else self._piece

    def _begin(self, target: Target) -> tuple[slice, Tensor, list[Mark]]:
        """Under the lock: which bytes of the record are copied next, where they are, and what must
        have passed before."""
        entry, slot = target.entry, self.slots[target.slot]
        slot.holds = None  # nobody may compute with it from here on
        if slot.source is not entry or slot.version != entry.version:
            slot.source, slot.version, slot.filled = entry, entry.version, 0
        # guards the row from eviction while the copy is being issued
        entry.upload = _Issuing()
        size = self._record if target.sure else self._piece
        piece = slice(slot.filled, min(slot.filled + size, self._record))
        source = self.store.host(entry, Part.WEIGHTS)
        if piece.stop - piece.start != self._record:
            source = source[piece]
        # the first piece waits for the slot's last reader on the compute stream
        return piece, source, [slot.free] if piece.start == 0 else []

    def _issue(self, target: Target, piece: slice, source: Tensor, after: list[Mark]) -> None:
        entry, slot = target.entry, self.slots[target.slot]
        version = slot.version
        whole = piece.stop == self._record
        room = self._rows[target.slot]
        if source.nbytes != self._record:
            room = room[piece]
        name = f"expert {entry.id.layer}.{entry.id.index} {target.why}".rstrip()
        mark = self.lane.copy([(room, source)], name, after=after)
        with self.store.lock:
            entry.upload = mark
            slot.filled = piece.stop
            if whole:
                slot.source = None
                if slot.target is entry:
                    slot.holds, slot.version, slot.ready = entry, version, mark
                    slot.used = False
                self.store.wake_main.notify_all()
        if entry.disk_row is not None and self.row_read is not None:
            mark.wait()  # its row can be given away now, and nothing else would tell
            self.row_read()
        self._in_flight.append((mark, source.nbytes))

    def close(self) -> None:
        with self.store.lock:
            self._closed = True
            self.store.wake_loader.notify_all()
        if self._thread is not threading.current_thread():  # a finalizer may run in any thread
            self._thread.join()
        self.slab, self._rows = self.slab.new_empty(0), ()  # the memory goes with the last view


class _Issuing:
    def done(self) -> bool:
        return False
