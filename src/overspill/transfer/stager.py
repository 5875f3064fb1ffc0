"""The stager brings experts that live on disk into host rows ahead of their use and writes back
what changed. What is needed in which order is told by `needs`; the stager only carries it out."""

import functools
import itertools
from collections.abc import Callable, Iterable

from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import Inject
from overspill.transfer.requests import RequestQueue

_KINDS = ("ssd read", "ssd write")

Needs = Callable[[], Iterable[tuple[Entry, Part]]]
"""Yields (expert, parts) in the order in which they will be wanted in host memory."""


class Stager:
    """Moves records between disk and the cache rows. All methods but the jobs run under the lock.

    The rows hold the experts that are needed next, in order, as many as there are rows. A row is
    given away when its expert is not among them, nothing of it is newer than the disk and nobody
    reads it; the least recently used goes first.
    """

    def __init__(
        self,
        store: ExpertStore,
        needs: Needs,
        workers: int,
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        self.store = store
        self.needs = needs
        self.recorder = recorder
        self.inject = inject
        self._cached: set[Entry] = set()
        self._tick = itertools.count(1)
        self._closed = False
        # Pools of their own: a burst of write-backs must not stop the reads, and a disk that reads
        # and writes at once moves more than one that does either.
        self._queues = {
            kind: RequestQueue(kind.replace(" ", "-"), workers, store.fail) for kind in _KINDS
        }

    def pump(self) -> None:
        """Starts every read and write that can start now."""
        with self.store.lock:
            if self.store.error is not None or self._closed:
                return
            wanted = self._wanted()
            for entry in self._cached:
                if entry.dirty and entry not in wanted and not entry.queued and not entry.io:
                    self._start(entry, entry.dirty, write=True, urgency=0)
            for position, (entry, parts) in enumerate(wanted.items()):
                missing = parts & ~entry.have & ~entry.io
                if not missing:
                    continue
                if entry.row is None and not self._give_row(entry, wanted):
                    break  # in order: a later expert must not take the row of a sooner one
                self._start(entry, missing, write=False, urgency=position)

    def _wanted(self) -> dict[Entry, Part]:
        wanted: dict[Entry, Part] = {}
        for entry, parts in self.needs():
            if entry.disk_row is None:
                continue
            if entry not in wanted:
                if len(wanted) == self.store.cache_rows:
                    break
                wanted[entry] = parts
                if entry.row is not None:
                    entry.last_use = next(self._tick)
        return wanted

    def _give_row(self, entry: Entry, wanted: dict[Entry, Part]) -> bool:
        if not self.store.free_rows:
            idle = [
                held
                for held in self._cached
                if held not in wanted
                and not held.dirty
                and not held.io
                and not held.queued
                and (held.upload is None or held.upload.done())
            ]
            if not idle:
                return False
            victim = min(idle, key=lambda held: held.last_use)
            assert victim.row is not None
            self.store.free_rows.append(victim.row)
            victim.row, victim.have, victim.upload = None, Part(0), None
            self._cached.remove(victim)
        entry.row = self.store.free_rows.pop()
        entry.have = Part(0)
        entry.last_use = next(self._tick)
        self._cached.add(entry)
        return True

    def _start(self, entry: Entry, parts: Part, write: bool, urgency: int) -> None:
        kind = "ssd write" if write else "ssd read"
        for part in Part:
            if parts & part:
                entry.io |= part
                if write:
                    # from here on: an update during the write makes it dirty again
                    entry.dirty &= ~part
                # the weights of an expert are wanted before its states: the upload waits for them
                job = functools.partial(self._carry_out, entry, part, kind)
                self._queues[kind].submit(kind, (urgency, int(part)), job)

    def _carry_out(self, entry: Entry, part: Part, kind: str) -> None:
        if self.inject is not None:
            self.inject(kind)
        file, row = self.store.files[part], self.store.host(entry, part)
        assert entry.disk_row is not None
        self.recorder.add_bytes(kind, row.nbytes)
        with self.recorder.span(kind, f"{part.name} {entry.id.layer}.{entry.id.index}", row.nbytes):
            if kind == "ssd write":
                file.write(entry.disk_row, row)
            else:
                file.read(entry.disk_row, row)
        with self.store.lock:
            entry.io &= ~part
            if kind == "ssd read":
                entry.have |= part
            self.pump()
            self.store.notify_all()

    def idle(self) -> bool:
        """Under the lock: whether nothing is being read or written."""
        return not any(entry.io for entry in self._cached)

    def close(self) -> None:
        with self.store.lock:
            self._closed = True  # what still ends must start nothing new
        for queue in self._queues.values():
            queue.close()
