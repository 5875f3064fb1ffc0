"""A loader whose uploads are carried by the porter, a native thread: the interpreter only says what
is needed, and when something that is has become ready."""

from collections.abc import Sequence

from torch import Tensor

from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.transfer.driver import PorterCalls, event_handle, porter_calls
from overspill.transfer.lanes import Lane, Mark
from overspill.transfer.loader import Loader, Target
from overspill.transfer.porter import Limits, Porter, porter_library


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
        self._readers: list[Mark | None] = [None] * n_slots  # what orders wait for: kept alive
        self._listed: list[int] = []  # slots that are to be carried
        self._addresses: dict[int, int] = {}  # of experts: views take time
        self._row_bytes = slab.stride(0) * slab.element_size()
        self._base = slab.data_ptr()
        # the thread of the base class begins at once
        with store.lock:
            super().__init__(store, slab, lane, n_slots)
            self._porter = Porter(calls, n_slots, self._record, self._piece)
        lane.recorder.add_source(self._tell)

    def fresh(self, entry: Entry, slot: int) -> bool:
        return self._coming(entry, slot) and self._issued(slot)

    def _coming(self, entry: Entry, slot: int) -> bool:
        return super().fresh(entry, slot)

    def _issued(self, slot: int) -> bool:
        return bool(self._porter.issued[slot] == self._porter.orders[slot].number)

    def arrived(self, slot: int) -> bool:
        return self._porter.ends[slot] <= self._porter.passed()

    def ends(self, slots: Sequence[int]) -> list[Mark]:
        mark = self._porter.arrival(slots)  # they arrive in the order in which they were issued
        return [] if mark is None else [mark]

    def await_issued(self, pairs: Sequence[tuple[Entry, int]], every: bool) -> None:
        enough = all if every else any
        while True:
            with self.store.lock:
                self.store.wait_main(lambda: enough(self._coming(*pair) for pair in pairs))
                if enough(self.fresh(*pair) for pair in pairs):
                    return
                slots = [slot for entry, slot in pairs if self._coming(entry, slot)]
                numbers = [(slot, self._porter.orders[slot].number) for slot in slots]
            self._porter.wait(numbers, every)  # and look again: weights may have changed

    def set_targets(self, targets: Sequence[Target]) -> None:
        self._wanted = targets
        dropped = set(self._listed)
        self._list()
        for slot in dropped.difference(self._listed):
            if not self._issued(slot):
                self.slots[slot].holds = None

    def settle(self) -> None:
        super().settle()
        self._porter.settle()

    def idle(self) -> bool:
        """Under the lock: whether every upload that is possible has been ordered."""
        return self._closed or not any(
            target.entry.readable and not self._coming(target.entry, target.slot)
            for target in self._wanted
        )

    def _list(self) -> None:
        """Under the lock: tells the porter what to carry, of all that is wanted and ready."""
        items: list[int] = []
        before = list(self._readers)  # until the porter has let go of them
        issued, orders, slots = self._porter.issued, self._porter.orders, self.slots
        for target in self._wanted:
            entry, number, _, sure = target
            slot = slots[number]
            if slot.holds is entry and slot.version == entry.version:
                if issued[number] == orders[number].number:
                    continue
            elif entry.readable:
                self._order(target)
            else:
                continue
            items += number, sure
        self._listed = items[::2]
        limits = Limits(self._limit(sure=False), self._limit(sure=True))
        self._porter.carry(items, limits, self.lane.recorder.enabled)
        del before

    def _order(self, target: Target) -> None:
        """Under the lock: another expert belongs in the slot, or new weights of the same."""
        entry, number, slot = target.entry, target.slot, self.slots[target.slot]
        slot.holds, slot.version, slot.used = entry, entry.version, False
        self._readers[number] = slot.free
        self._last_number += 1
        order = self._porter.orders[number]
        order.to = self._base + number * self._row_bytes
        order.source = self._address(entry)
        order.after = event_handle(slot.free.event)
        order.number = self._last_number
        order.tag = entry.number << 8 | self._whys.setdefault(target.why, len(self._whys))

    def _address(self, entry: Entry) -> int:
        known = self._addresses.get(entry.number)
        if known is None:
            known = self.store.host(entry, Part.WEIGHTS).data_ptr()
            self._addresses[entry.number] = known
        return known

    def _run(self) -> None:
        try:
            with self.store.lock:
                while not self._closed:
                    if not self.idle():
                        self._list()
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
        super().close()
        self._porter.stop()
        self.lane.recorder.remove_source(self._tell)
        self._porter.close()
