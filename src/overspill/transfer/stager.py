"""The stager reads experts that are on disk into host slots ahead of their use and writes changed
experts back. Its caller decides which experts will be needed, and in which order."""

import functools
from collections.abc import Callable, Iterable

from overspill.tiers.entry import Entry, Part
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.requests import RequestQueue
from overspill.transfer.streams import Inject

_LANES = ("ssd read", "ssd write")

Needs = Callable[[], Iterable[tuple[Entry, Part]]]
"""Yields (expert, parts) in the order in which they will be needed in host memory."""


class _Started:
    """State of a queued transfer: whether it is still to be carried out."""

    cancelled = False


class Stager:
    """Transfers of records between disk and the cache slots of host memory.

    The cache slots hold the experts that are needed next, in order, as many as there are slots. An
    expert that is not among them gives its slot away once nothing of it is newer than the disk and
    no copy reads it; the least recently used one goes first.
    """

    def __init__(
        self,
        store: ExpertStore,
        needs: Needs,
        workers: int,
        recorder: Recorder,
        inject: Inject | None,
        training: bool = True,
    ) -> None:
        """After any failure in training, the store refuses to go on. Otherwise an expert that could
        not be read is an error only where it is needed."""
        self._store = store
        self._sync = store.sync
        self._places = store.places
        self._needs = needs
        self._recorder = recorder
        self._inject = inject
        self._training = training
        self._closed = False
        # One queue each: many writes must not delay the reads, and a disk that reads and writes at
        # once moves more bytes than one that does either.
        self._queues: dict[str, RequestQueue] = {}
        try:
            for lane in _LANES:
                self._queues[lane] = RequestQueue(lane.replace(" ", "-"), workers, store.sync.fail)
            store.disk.on_change(self.pump)
        except BaseException:  # the system may allow no more threads
            self.close()
            raise

    def pump(self) -> None:
        """Start every read and write that can start now."""
        with self._sync.lock:
            if self._sync.error is not None or self._closed:
                return
            try:
                self._start_transfers()
            except BaseException:  # an interrupt: the caller may be the main thread
                self._places.recount_slots()
                raise

    def _start_transfers(self) -> None:
        wanted = self._wanted()
        for entry in self._places.cached():
            if entry.dirty and entry not in wanted and not entry.holds and not entry.io:
                self._start(entry, entry.dirty, write=True, urgency=0)
        full = False
        for urgency, (entry, parts) in enumerate(wanted.items()):
            missing = parts & ~entry.valid & ~entry.io
            if not missing:
                continue
            if entry.host_slot is None and not full:
                full = not self._places.assign_host_slot(entry, wanted)
            # In order: a later expert must not take the slot of a sooner one. But an update that
            # waits for parts in its slot gets them, or the slot would never be free.
            if full and (entry.host_slot is None or not entry.holds):
                continue
            self._start(entry, missing, write=False, urgency=urgency)

    def _wanted(self) -> dict[Entry, Part]:
        wanted: dict[Entry, Part] = {}
        for entry, parts in self._needs():
            if entry.disk_slot is None or entry in wanted or self._store.disk.is_unreadable(entry):
                continue
            if len(wanted) == self._places.cache_slots:
                break
            wanted[entry] = parts
            if entry.host_slot is not None:
                self._places.touch(entry)
        return wanted

    def _start(self, entry: Entry, parts: Part, write: bool, urgency: int) -> None:
        lane = "ssd write" if write else "ssd read"
        for part in Part:
            if parts & part:
                started = _Started()
                job = functools.partial(self._transfer, entry, part, lane, started)
                try:
                    self._store.disk.begin_io(entry, part, write)
                    # weights before states: an upload waits for the weights
                    self._queues[lane].submit((urgency, int(part)), job)
                except BaseException:  # an interrupt
                    started.cancelled = True
                    self._store.disk.cancel_io(entry, part, write)
                    raise

    def _transfer(self, entry: Entry, part: Part, lane: str, started: _Started) -> None:
        with self._sync.lock:  # held by `pump` until it is certain
            if started.cancelled:
                return
        write = lane == "ssd write"
        try:
            self._move(entry, part, lane, write)
        except BaseException as error:
            self._fail(entry, part, write, error)
        else:
            self._store.disk.end_io(entry, part, write)

    def _fail(self, entry: Entry, part: Part, write: bool, error: BaseException) -> None:
        with self._sync.lock:
            self._store.disk.cancel_io(entry, part, write)
            if self._training or write or not isinstance(error, OSError):
                self._sync.fail(error)
            else:
                self._store.disk.fail_read(entry, error)

    def _move(self, entry: Entry, part: Part, lane: str, write: bool) -> None:
        if self._inject is not None:
            self._inject(lane)
        file, memory = self._store.memory.files[part], self._store.host(entry, part)
        assert entry.disk_slot is not None
        self._recorder.add_bytes(lane, memory.nbytes)
        label = f"{part.name} {entry.id.layer}.{entry.id.index}"
        with self._recorder.span(lane, label, memory.nbytes):
            if write:
                file.write(entry.disk_slot, memory)
            else:
                file.read(entry.disk_slot, memory)

    def idle(self) -> bool:
        """Whether no part is being read or written. Called under the lock."""
        return not self._places.disk_busy()

    def close(self) -> None:
        with self._sync.lock:
            self._closed = True  # transfers that end now must start no others
        for queue in self._queues.values():
            queue.close()
