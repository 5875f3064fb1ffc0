"""A loader whose uploads are carried by the porter, a native thread: the interpreter only says what
is needed, and when something that is has become ready."""

from collections.abc import Sequence

from torch import Tensor

from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.transfer.driver import PorterCalls, event_handle, porter_calls
from overspill.transfer.lanes import Lane, Mark
from overspill.transfer.loader import Loader, Target
from overspill.transfer.porter import Limits, Order, Porter, porter_library


def new_loader(store: ExpertStore, slab: Tensor, lane: Lane, n_slots: int) -> Loader:
    """With a porter where there can be one. Rows of experts on disk move, and tests look on: both
    need to be told of each copy."""
    if lane.stream is not None and lane.inject is None and not store.disk_rows:
        calls = porter_calls(lane.stream)
        if calls is not None and porter_library() is not None:
            return PortedLoader(store, slab, lane, n_slots, calls)
    return Loader(store, slab, lane, n_slots)


class PortedLoader(Loader):
    """A slot `holds` an expert from the moment its upload was ordered; it is `fresh` once that was
    issued. Our own thread wakes when experts that were not ready may be."""

    def __init__(
        self, store: ExpertStore, slab: Tensor, lane: Lane, n_slots: int, calls: PorterCalls
    ) -> None:
        self._whys: dict[str, int] = {}
        self._last_number = 0
        self._numbers = [0] * n_slots  # of the last order for each slot
        self._readers: list[Mark | None] = [None] * n_slots  # what those wait for: kept alive
        self._ordered: set[int] = set()  # slots of the orders that may be left
        self._row_bytes = slab.stride(0) * slab.element_size()
        self._base = slab.data_ptr()
        # the thread of the base class begins at once
        with store.lock:
            super().__init__(store, slab, lane, n_slots)
            self._porter = Porter(calls, n_slots, self._record, self._piece)
        lane.recorder.add_source(self._tell)

    def fresh(self, entry: Entry, slot: int) -> bool:
        return self._coming(entry, slot) and self._porter.issued[slot] == self._numbers[slot]

    def _coming(self, entry: Entry, slot: int) -> bool:
        return super().fresh(entry, slot)

    def arrived(self, slot: int) -> bool:
        return self._porter.ends[slot] <= self._porter.passed()

    def ends(self, slots: Sequence[int]) -> list[Mark]:
        mark = self._porter.arrival(slots)  # they arrive in the order in which they were issued
        return [] if mark is None else [mark]

    def await_issued(self, pairs: Sequence[tuple[Entry, int]], every: bool) -> None:
        enough = all if every else any
        with self.store.lock:
            self.store.wait_main(lambda: enough(self._coming(*pair) for pair in pairs))
            numbers = [(s, self._numbers[s]) for e, s in pairs if self._coming(e, s)]
            if enough(self._porter.issued[slot] == number for slot, number in numbers):
                return
        self._porter.wait(numbers, every)

    def set_targets(self, targets: Sequence[Target]) -> None:
        self._wanted = targets
        before, self._ordered = self._ordered, set()
        for target in targets:
            self.slots[target.slot].target = target.entry
        missing = [(n, t) for n, t in enumerate(targets) if not self.fresh(t.entry, t.slot)]
        self._order(missing, replace=True)
        for slot in before:
            if slot not in self._ordered and self._porter.issued[slot] != self._numbers[slot]:
                self.slots[slot].holds = None  # it was dropped before all of it was issued

    def settle(self) -> None:
        super().settle()
        self._porter.settle()

    def idle(self) -> bool:
        """Under the lock: whether every upload that is possible has been ordered."""
        return self._closed or not any(
            _ready(target.entry) and not self._coming(target.entry, target.slot)
            for target in self._wanted
        )

    def _order(self, missing: Sequence[tuple[int, Target]], replace: bool) -> None:
        """Under the lock: gives the porter those that are ready."""
        orders = [
            self._new_order(rank, target)
            for rank, target in missing
            if _ready(target.entry) or self._coming(target.entry, target.slot)
        ]
        if orders or replace:
            limits = Limits(self._limit(sure=False), self._limit(sure=True))
            self._porter.carry(orders, replace, limits, self.lane.recorder.enabled)

    def _new_order(self, rank: int, target: Target) -> Order:
        entry, number, place = target.entry, target.slot, self.slots[target.slot]
        if not self._coming(entry, number):
            place.holds, place.version, place.used = entry, entry.version, False
            self._last_number += 1
            self._numbers[number] = self._last_number
            self._readers[number] = place.free
        reader = self._readers[number]
        self._ordered.add(number)
        return Order(
            self._base + number * self._row_bytes,
            self.store.host(entry, Part.WEIGHTS).data_ptr(),
            None if reader is None else event_handle(reader.event),
            self._numbers[number],
            rank,
            entry.number << 8 | self._whys.setdefault(target.why, len(self._whys)),
            number,
            target.sure,
        )

    def _run(self) -> None:
        try:
            with self.store.lock:
                while not self._closed:
                    wanted = enumerate(self._wanted)
                    missing = [(n, t) for n, t in wanted if not self._coming(t.entry, t.slot)]
                    self._order(missing, replace=False)
                    self.store.wake_main.notify_all()
                    self.store.wake_loader.wait()
        except BaseException as error:
            self.store.fail(error)

    def _tell(self) -> None:
        """Tells the recorder what was carried."""
        lines, size = self._porter.take_lines()
        recorder, row = self.lane.recorder, self.lane.row
        if size:
            recorder.add_bytes(row, size)
        names = list(self._whys)
        for line in lines:
            id = self.store.entries[line.tag >> 8].id
            name = f"expert {id.layer}.{id.index} {names[line.tag & 255]}".rstrip()
            recorder.past_span(row, name, line.begin_ns, line.end_ns, line.bytes)

    def close(self) -> None:
        self._tell()
        self.lane.recorder.remove_source(self._tell)
        super().close()
        self._porter.close()


def _ready(entry: Entry) -> bool:
    return not entry.stale and bool(entry.have & Part.WEIGHTS) and entry.row is not None
