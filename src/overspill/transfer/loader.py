"""The loader thread fills the slots of the compute device. It is told which expert belongs in which
slot, in the order of need, and copies each one as soon as its record is ready in host memory."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.transfer.lanes import PASSED, Lane, Mark

_IN_FLIGHT_BYTES = 64 << 20
"""Copies queued on the lane ahead of the one running; enough to keep PCIe full, few enough that an
urgent upload is not stuck behind a long queue."""


class Slot:
    """One record's room on the compute device. Guarded by the store's lock."""

    __slots__ = ("free", "holds", "ready", "target", "version")

    def __init__(self) -> None:
        self.target: Entry | None = None  # who belongs here
        self.holds: Entry | None = None  # whose upload was issued last
        self.version = -1  # of the weights that were uploaded
        self.ready: Mark = PASSED  # end of that upload
        self.free: Mark = PASSED  # end of the last computation that read the slot


class Loader:
    """Carries out uploads. `set_targets` replaces the list; what had not started is dropped."""

    def __init__(self, store: ExpertStore, slab: Tensor, lane: Lane, n_slots: int) -> None:
        self.store = store
        self.slab = slab
        self.lane = lane
        self.overlap = True  # off: one copy at a time, as the sequential twin
        self.slots = [Slot() for _ in range(n_slots)]
        self.row_read: Callable[[], None] | None = None  # told when a disk expert's row was read
        self._targets: deque[tuple[Entry, int]] = deque()
        self._in_flight: deque[Mark] = deque()
        self._max_in_flight = max(2, _IN_FLIGHT_BYTES // slab.shape[1])
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="overspill-loader", daemon=True)
        self._thread.start()

    def fresh(self, entry: Entry, slot: int) -> bool:
        """Whether the upload of the expert's current weights into `slot` has been issued."""
        place = self.slots[slot]
        return place.holds is entry and place.version == entry.version

    def set_targets(self, targets: Sequence[tuple[Entry, int]]) -> None:
        """Under the lock: what belongs where from now on, most urgent first."""
        self._targets.clear()
        for entry, slot in targets:
            self.slots[slot].target = entry
            if not self.fresh(entry, slot):
                self._targets.append((entry, slot))
        if self._targets:
            self.store.wake_loader.notify()

    def idle(self) -> bool:
        """Under the lock: whether every upload that can be issued has been."""
        return not self._busy and self._next() is None

    def _next(self) -> tuple[Entry, int] | None:
        for _ in range(len(self._targets)):
            entry, slot = self._targets[0]
            if not self.fresh(entry, slot):
                break
            self._targets.popleft()
        for entry, slot in self._targets:
            ready = not entry.stale and entry.have & Part.WEIGHTS and entry.row is not None
            if ready and not self.fresh(entry, slot):
                return entry, slot
        return None

    def _run(self) -> None:
        try:
            while True:
                with self.store.lock:
                    self._busy = False
                    job = self._next()
                    if job is None:
                        self.store.wake_main.notify_all()  # it may wait for everything to rest
                    while job is None and not self._closed:
                        self.store.wake_loader.wait()
                        job = self._next()
                    if self._closed or job is None:
                        return
                    self._busy = True
                    entry, number = job
                    slot = self.slots[number]
                    slot.holds = None  # nobody may compute with it from here on
                    version, free = entry.version, slot.free
                    # guards the row from eviction while the copy is being issued
                    entry.upload = _Issuing()
                    source = self.store.host(entry, Part.WEIGHTS)
                mark = self.lane.copy(
                    [(self.slab[number], source)],
                    f"expert {entry.id.layer}.{entry.id.index}",
                    after=[free],  # the slot's last reader on the compute stream
                )
                with self.store.lock:
                    entry.upload = mark
                    if slot.target is entry:
                        slot.holds, slot.version, slot.ready = entry, version, mark
                    self.store.wake_main.notify_all()
                if entry.disk_row is not None and self.row_read is not None:
                    mark.wait()  # its row can be given away now, and nothing else would tell
                    self.row_read()
                self._throttle(mark)
        except BaseException as error:  # a dead loader must not leave the main thread waiting
            self.store.fail(error)

    def _throttle(self, mark: Mark) -> None:
        self._in_flight.append(mark)
        limit = self._max_in_flight if self.overlap else 0
        while len(self._in_flight) > limit:
            self._in_flight.popleft().wait()

    def close(self) -> None:
        with self.store.lock:
            self._closed = True
            self.store.wake_loader.notify_all()
        if self._thread is not threading.current_thread():  # a finalizer may run in any thread
            self._thread.join()
        self.slab = self.slab.new_empty(0)  # the memory goes with the last view of it


class _Issuing:
    def done(self) -> bool:
        return False
