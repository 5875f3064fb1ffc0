"""An uploader whose copies are issued by a native thread, for experts that always stay in host
memory. Python says what is needed, and when an expert that was not readable has become so."""

import threading
from collections.abc import Sequence

from torch import Tensor

from overspill.tiers.entry import Entry, Part
from overspill.tiers.store import ExpertStore
from overspill.tiers.worker_sync import Watchdog
from overspill.transfer.driver import event_handle
from overspill.transfer.streams import CopyStream, StreamEvent
from overspill.transfer.upload_thread import InFlightLimits, UploadCalls, UploadThread
from overspill.transfer.uploader import REPLICAS, PieceSizes, Target, Uploader, upload_label


class NativeUploader(Uploader):
    """A slot's `entry` is set when its upload is requested; the upload is issued when the native
    thread has reached the command's number. A Python thread requests uploads of experts that
    become readable later."""

    def __init__(
        self,
        store: ExpertStore,
        slab: Tensor,
        stream: CopyStream,
        n_slots: int,
        calls: UploadCalls,
        sizes: PieceSizes | None = None,
    ) -> None:
        super().__init__(slab, n_slots, sizes or PieceSizes(), store.weight_bytes)
        self._store = store
        self._sync = store.sync
        self._stream = stream
        self._wanted: Sequence[Target] = ()
        self._reasons: dict[str, int] = {}
        self._last_number = 0
        self._readers: list[StreamEvent | None] = [None] * n_slots  # commands wait for them
        self._old_readers: list[StreamEvent | None] = []
        self._listed: list[int] = []  # slots whose upload is requested
        self._from_replicas: set[int] = set()  # slots whose last command reads a replica
        self._addresses: dict[int, int] = {}  # of host slots: a view takes time to make
        self._stride = slab.stride(0) * slab.element_size()
        self._base = slab.data_ptr()
        self._closed = False
        inject = None if stream.inject is None else stream.run_inject
        self._native = UploadThread(
            calls, n_slots, self.record_bytes, self.piece_bytes, inject, store.sync.fail
        )
        self._thread = threading.Thread(target=self._run, name="overspill-uploader", daemon=True)
        self._thread.start()
        stream.recorder.add_source(self._report)

    def set_targets(self, targets: Sequence[Target]) -> None:
        self._wanted = targets
        before = set(self._listed)
        self._request()
        for slot in before.difference(self._listed):
            if not self._all_issued(slot):
                self.slots[slot].entry = None

    def is_issued(self, entry: Entry, slot: int) -> bool:
        return self._is_requested(entry, slot) and self._all_issued(slot)

    def wait_issued(self, pairs: Sequence[tuple[Entry, int]], every: bool) -> None:
        enough = all if every else any
        labels = ", ".join(upload_label(entry, "") for entry, _ in pairs[:3])
        what = f"the upload of {labels} (uploader thread)"
        watchdog: Watchdog | None = None  # most waits are short
        while True:
            with self._sync.lock:
                self._sync.wait(lambda: enough(self._is_requested(*pair) for pair in pairs), what)
                if enough(self.is_issued(*pair) for pair in pairs):
                    return
                slots = [slot for entry, slot in pairs if self._is_requested(entry, slot)]
                numbers = [(slot, self._native.commands[slot].number) for slot in slots]
            if not self._native.wait(numbers, every):
                watchdog = self._watch(watchdog, what)
            # then look again: weights may have changed

    def has_arrived(self, slot: int) -> bool:
        return self._native.ends[slot] <= self._native.completed()

    def end_events(self, slots: Sequence[int]) -> list[StreamEvent]:
        event = self._native.arrival(slots)  # copies arrive in the order they were issued
        return [] if event is None else [event]

    def idle(self) -> bool:
        return self._closed or not any(
            self._store.replicas.can_upload(target.entry)
            and not self._is_requested(target.entry, target.slot)
            for target in self._wanted
        )

    def wait_idle(self) -> None:
        what = "pending uploads (uploader thread)"
        self._sync.wait(self.idle, what)
        watchdog: Watchdog | None = None
        while not self._native.wait_idle():
            watchdog = self._watch(watchdog, what)

    def withdraw_replicas(self) -> None:
        with self._sync.lock:
            if self._closed:  # during a pass, which fails
                return
            for slot in self._from_replicas:
                if not self._all_issued(slot):
                    self.slots[slot].entry = None  # what is still wanted begins again
            self._from_replicas.clear()
            self._request()

    def close(self) -> None:
        with self._sync.lock:
            self._closed = True
            self._sync.wake_uploader()
        if self._thread is not threading.current_thread():  # a finalizer may run in any thread
            self._thread.join()
        self._native.stop()
        self._stream.recorder.remove_source(self._report)
        self._native.close()
        self.slab = self.slab.new_empty(0)

    def _watch(self, watchdog: Watchdog | None, what: str) -> Watchdog:
        """Raise if a wait goes on and no upload has arrived for too long."""
        with self._sync.lock:
            self._sync.raise_error()
            watchdog = watchdog or self._sync.watchdog(what)
            watchdog.check(self._native.completed())
            return watchdog

    def _is_requested(self, entry: Entry, slot: int) -> bool:
        place = self.slots[slot]
        return place.entry is entry and place.version == entry.version

    def _all_issued(self, slot: int) -> bool:
        return bool(self._native.issued[slot] == self._native.commands[slot].number)

    def _request(self) -> None:
        """Hand the native thread all wanted uploads that are possible now. (lock)"""
        items: list[int] = []
        self._old_readers += self._readers  # until the native thread has the new list
        issued, commands, slots = self._native.issued, self._native.commands, self.slots
        for target in self._wanted:
            entry, number, _, certain = target
            slot = slots[number]
            if slot.entry is entry and slot.version == entry.version:
                if issued[number] == commands[number].number:
                    continue
            elif self._store.replicas.can_upload(entry):
                self._write_command(target)
            else:
                continue
            items += number, certain
        self._listed = items[::2]
        limits = InFlightLimits(self.in_flight_limit(False), self.in_flight_limit(True))
        self._native.set_uploads(items, limits, self._stream.recorder.enabled)
        self._old_readers.clear()

    def _write_command(self, target: Target) -> None:
        """Write the command of an upload: of another expert than the slot has, or of new weights of
        the same. (lock)"""
        entry, number, slot = target.entry, target.slot, self.slots[target.slot]
        slot.entry = None  # until the command is written: an interrupt may come
        self._readers[number] = slot.free
        self._last_number += 1
        command = self._native.commands[number]
        command.to = self._base + number * self._stride
        replica = self._store.replicas.of(entry)
        command.source = self._address(entry) if replica is None else replica.data_ptr()
        command.in_device = replica is not None
        command.bytes = self.weight_bytes[entry.id.layer]
        (self._from_replicas.discard if replica is None else self._from_replicas.add)(number)
        command.after = event_handle(slot.free.event)
        command.number = self._last_number
        reason = self._reasons.setdefault(target.reason, len(self._reasons))
        command.tag = entry.number << 8 | reason
        slot.entry, slot.version, slot.used = entry, entry.version, False

    def _address(self, entry: Entry) -> int:
        place = ~entry.number if entry.host_slot is None else entry.host_slot  # of a remote expert
        known = self._addresses.get(place)
        if known is None:
            known = self._store.host(entry, Part.WEIGHTS).data_ptr()
            self._addresses[place] = known
        return known

    def _run(self) -> None:
        try:
            with self._sync.lock:
                while not self._closed:
                    if not self.idle():
                        self._request()
                        self._sync.wake_main()
                    self._sync.wait_uploader(self._awaits_remote(self._wanted))
        except BaseException as error:  # the main thread waits for uploads
            self._sync.fail(error)

    def _report(self) -> None:
        """Pass traced copies on to the recorder."""
        copies, uploaded, in_device = self._native.take_traced()
        recorder, lane = self._stream.recorder, self._stream.name
        for counter, size in ((lane, uploaded), (REPLICAS, in_device)):
            if size:
                recorder.add_bytes(counter, size)
        reasons = list(self._reasons)
        for copy in copies:
            entry = self._store.places.numbered(copy.tag >> 8)
            label = upload_label(entry, reasons[copy.tag & 255])
            recorder.past_span(lane, label, copy.begin_ns, copy.end_ns, copy.bytes)
