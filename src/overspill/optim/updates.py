"""Expert-wise updates: threads take each gradient as it arrives in host memory and run the fused
AdamW pass over that expert's record, lowest layer first, while the GPU continues.

A pass over a record ends with the slowest of its cores, and the cores are idle until the next one
begins. So several records are updated at a time, and only large ones by several cores each.
"""

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from overspill.compute.cpu_kernel import factor_row_bytes
from overspill.optim.arguments import AdamHyper, RecordState
from overspill.optim.factored import Factors, adamw_factored_, form_gradient, square_of
from overspill.optim.kernel import accumulate_, adamw_
from overspill.tiers.entry import Entry, Part
from overspill.tiers.remote_experts import RemoteExpert
from overspill.tiers.slab import HostSlab
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.downloads import GradientRing
from overspill.transfer.outboxes import GradientPart
from overspill.transfer.streams import Inject, StreamEvent


class FactorRows(NamedTuple):
    """Rows of memory that have the factors of a gradient in its place."""

    rows: int
    first: int = 0  # of a ring buffer
    is_measured: bool = False  # the sum of squares of the gradient is known


@dataclass(frozen=True)
class Update:
    """Task for an update thread: a change of one expert once the copy `arrived` has ended.

    A gradient in ring buffer `buffer` is added to the expert's kept gradient (`accumulate`) or used
    directly; with `use_kept` the kept gradient is used. With `hyper` the expert is updated, without
    a gradient by decay alone, with `accumulate` by the sum; without `hyper` the gradient is only
    kept.

    With `factors` the ring buffer, or the kept gradient, has these in place of a gradient. With
    `hyper` the expert is updated by them, with `accumulate` the gradient is formed first, without
    both the sum of its squares is computed.

    `parts` of a gradient, in outboxes, are added in their order, with `accumulate` to the kept one.
    `then` is called at the end.
    """

    entry: Entry
    arrived: StreamEvent
    buffer: int | None = None
    accumulate: bool = False
    use_kept: bool = False
    hyper: AdamHyper | None = None
    factors: FactorRows | None = None
    parts: Sequence[GradientPart] = ()
    then: Callable[[], None] | None = None

    @property
    def only_publishes(self) -> bool:
        """Whether it only calls `then`, which publishes a gradient: another rank waits for it."""
        return self.then is not None and not self.parts and self.hyper is None

    @property
    def needs(self) -> Part:
        """The parts of the expert that must be in its host slot."""
        need = Part.WEIGHTS | Part.STATES if self.hyper is not None else Part(0)
        kept = self.accumulate or self.use_kept or (self.parts and self.hyper is None)
        return need | Part.GRADS if kept else need


class _Queued(NamedTuple):
    """Update with its place among others."""

    urgency: int  # the lowest comes first, as the next forward needs experts
    order: int
    update: Update

    @property
    def key(self) -> int:
        """Updates with the same key run in order: those of an expert. Publishing a gradient does
        not touch the expert."""
        return ~self.order if self.update.only_publishes else self.update.entry.number


_LEARNING_RATE = 0.1  # weight of the newest measurement
_PER_CORE = 1 << 23  # parameters: a core takes about 20 ms for them


class Updates:
    """Threads that update experts. `squares[number]` is the sum of squares of an expert's gradient,
    written by the device with the gradient, or here where gradients are accumulated;
    `added_squares[number]` is that of a gradient which is added to a kept one."""

    def __init__(
        self,
        store: ExpertStore,
        squares: Tensor,
        added_squares: Tensor,
        threads: int,
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        """At most `threads` cores are used. Nothing can be submitted before `start`."""
        self._store = store
        self._sync = store.sync
        no_buffers = HostSlab("gradient buffers", 0, store.memory.layout.weight_bytes, pinned=False)
        self.ring = GradientRing(store.sync, no_buffers)
        self._squares = squares
        self._added_squares = added_squares
        cores = min(threads, max(1, store.memory.layout.shape.numel // _PER_CORE))
        self._at_once = threads // cores  # updates, each in a thread of its own
        self._threads = threads // self._at_once  # of one pass
        self.seconds = 0.0
        """Measured time of one update by all threads; 0 before the first one."""
        self._recorder = recorder
        self._inject = inject
        self._submitted: deque[Update] = deque()
        self._arriving: deque[_Queued] = deque()  # downloads end in the order they were issued
        self._of_ranks: list[_Queued] = []  # wait for gradients of other ranks, in any order
        self._waiting: list[_Queued] = []  # arrived, but parts of the expert are still on disk
        self._ready: list[_Queued] = []
        # orders of updates that have not ended, by key
        self._pending: dict[int, deque[int]] = {}
        self._watched = False  # whether a thread waits for the first of `_arriving`
        self._polled = False  # whether a thread looks for gradients of other ranks
        self._order = itertools.count()
        self._closed = False
        self._workers: list[threading.Thread] = []
        self.is_started = False

    def start(self, ring: GradientRing) -> None:
        """Starts the threads, once. Gradients that updates use directly are in `ring`."""
        assert not self.is_started
        self.ring = ring
        self._workers = [
            threading.Thread(target=self._run, name="overspill-updates", daemon=True)
            for _ in range(self._at_once)
        ]
        for worker in self._workers:
            worker.start()
        self.is_started = True

    def submit(self, update: Update) -> None:
        """Queues an update, whose expert keeps its host slot until then."""
        assert self.is_started, "no optimizer is attached"
        with self._sync.lock:
            self._store.hold(update.entry)
            self._submitted.append(update)  # the rest is done by threads that Ctrl-C does not reach
            if not self._watched:  # else the thread that waits for an earlier one goes on to this
                self._sync.wake_update()

    def waiting(self) -> Iterable[tuple[Entry, Part]]:
        """Return experts whose update waits for parts on disk, under the lock. Experts with a host
        slot come first, because it cannot be reused before their update; then the lowest layer."""
        updates = [queued.update for queued in self._waiting]
        updates.sort(key=lambda u: (u.entry.host_slot is None, u.entry.number))
        return [(update.entry, update.needs) for update in updates]

    def idle(self) -> bool:
        """Whether every submitted update was carried out; under the lock."""
        return not (self._submitted or self._pending)

    @property
    def pending(self) -> int:
        """Number of experts with updates that have not ended; under the lock."""
        return len(self._submitted) + len(self._pending)

    def wait_idle(self) -> None:
        self._sync.wait(self.idle, "pending expert updates (update threads)")

    def wait_for(self, entry: Entry) -> None:
        """Blocks until every submitted update of an expert was carried out."""

        def is_idle() -> bool:
            submitted = any(update.entry is entry for update in self._submitted)
            return not submitted and entry.number not in self._pending

        self._sync.wait(is_idle, "pending updates of an expert (update threads)")

    def _queue(self) -> None:
        while self._submitted:
            update = self._submitted[0]
            urgency = -1 if update.only_publishes else update.entry.number
            queued = _Queued(urgency, next(self._order), update)
            self._pending.setdefault(queued.key, deque()).append(queued.order)
            (self._of_ranks if update.parts else self._arriving).append(queued)
            self._submitted.popleft()

    def _next(self) -> _Queued | None:
        self._queue()
        while self._arriving and self._arriving[0].update.arrived.done():
            self._waiting.append(self._arriving.popleft())
        of_ranks, self._of_ranks = self._of_ranks, []
        for queued in of_ranks:
            (self._waiting if queued.update.arrived.done() else self._of_ranks).append(queued)
        still = []
        for queued in self._waiting:
            update, entry = queued.update, queued.update.entry
            # a record that is being written to disk must not change during the write
            in_host = entry.host_slot is not None and not update.needs & ~entry.valid
            if (in_host or isinstance(entry, RemoteExpert)) and not entry.io:
                heapq.heappush(self._ready, queued)
            else:
                still.append(queued)
        self._waiting = still
        if still:
            self._store.disk.request_transfers()
        return self._pop()

    def _pop(self) -> _Queued | None:
        """Takes the first ready update whose expert has no earlier one."""
        skipped = []
        found = None
        while self._ready and found is None:
            first = heapq.heappop(self._ready)
            if first.order == self._pending[first.key][0]:
                found = first
            else:
                skipped.append(first)
        for one in skipped:
            heapq.heappush(self._ready, one)
        unwatched = (self._arriving and not self._watched) or (self._of_ranks and not self._polled)
        if found is not None and (self._ready or unwatched):
            self._sync.wake_update()  # another thread may take the next one, or wait for it
        return found

    def _run(self) -> None:
        try:
            while True:
                queued = arriving = None
                with self._sync.lock:
                    while (queued := self._next()) is None:
                        if self._arriving and not self._watched:
                            self._watched, arriving = True, self._arriving[0].update.arrived
                            break
                        if self._closed and not self._arriving and not self._of_ranks:
                            return
                        self._wait()
                if queued is not None:
                    self._carry_out(queued.update)
                    self._finish(queued)
                elif arriving is not None:
                    self._watch(arriving)
        except BaseException as error:  # a thread may wait for an update
            self._sync.fail(error)

    def _wait(self) -> None:
        """Under the lock: sleeps until there may be work. One thread looks for gradients of other
        ranks, which cannot wake it."""
        if not self._of_ranks or self._polled:
            self._sync.wait_updates()
            return
        self._polled = True
        try:
            self._sync.wait_updates(poll=True)
        finally:
            self._polled = False

    def _watch(self, arriving: StreamEvent) -> None:
        """Waits for a copy; the other threads need not."""
        try:
            arriving.wait()
        finally:
            with self._sync.lock:
                self._watched = False

    def _carry_out(self, update: Update) -> None:
        if not update.only_publishes:
            self._update(update)
        if update.buffer is not None:
            self.ring.give(update.buffer)
        if update.then is not None:
            update.then()

    def _update(self, update: Update) -> None:
        entry, layout = update.entry, self._store.memory.layout
        if self._inject is not None:
            self._inject("optimizer")
        label = f"expert {entry.id.layer}.{entry.id.index}"
        with self._recorder.span("optimizer", label, layout.weight_bytes):
            gradients = []  # to be added up: the kept one, then the one that has arrived
            if update.accumulate or update.use_kept:
                gradients.append(layout.weights(self._store.host(entry, Part.GRADS)))
            if update.buffer is not None:
                gradients.append(layout.weights(self.ring.buffers[update.buffer]))
            if update.factors is not None:
                if not update.accumulate:
                    self._use_factors(entry, gradients[0], update.factors, update.hyper)
                    return
                self._form(entry, gradients[0], update.factors)
            if update.parts:
                gradients = self._add_parts(update, gradients)
            if update.hyper is not None:
                began = time.perf_counter()
                self._adam(entry, gradients, update.hyper)
                share = (time.perf_counter() - began) / self._at_once
                before = self.seconds or share
                self.seconds = before + _LEARNING_RATE * (share - before)
            elif len(gradients) == 2:
                total = accumulate_(gradients[0], gradients[1], self._threads)
                self._squares[entry.number] = total

    def _use_factors(
        self, entry: Entry, memory: Tensor, place: FactorRows, hyper: AdamHyper | None
    ) -> None:
        """Update by factors, or compute the square of their gradient. The time is not noted: the
        cost model of CPU experts counts the products of factors itself."""
        factors, number = self._factors(memory, place), entry.number
        if not place.is_measured:
            self._squares[number] = square_of(factors, self._threads)
        if hyper is not None and math.isfinite(self._squares[number].item()):
            adamw_factored_(self._record(entry), factors, hyper, self._threads)

    def _form(self, entry: Entry, kept: Tensor, place: FactorRows) -> None:
        """Replace kept factors by the gradient."""
        copied = self._factors(kept, place)
        copied = copied._replace(memory=copied.memory.clone())
        self._squares[entry.number] = form_gradient(copied, kept, self._threads)

    def _factors(self, memory: Tensor, place: FactorRows) -> Factors:
        shape = self._store.memory.layout.shape
        size = factor_row_bytes(shape, memory.dtype) // memory.itemsize
        used = memory[place.first * size : (place.first + place.rows) * size]
        return Factors(used, place.rows, shape)

    def _add_parts(self, update: Update, kept: list[Tensor]) -> list[Tensor]:
        """Add all parts of a gradient but the last to the kept one, or to the first. Return that
        sum, and the last part if the caller has to add it."""
        number, rest = update.entry.number, list(update.parts)
        finite = all(math.isfinite(part.square.item()) for part in rest)
        if kept:
            self._added_squares[number] = 0.0 if finite else math.nan
            (into,) = kept
        else:
            first = rest.pop(0)
            into = first.gradient
            self._squares[number] = first.square if finite else math.nan
            self._added_squares[number] = 0.0
            if update.hyper is None:
                into = self._store.memory.layout.weights(self._store.host(update.entry, Part.GRADS))
                into.copy_(first.gradient)
        for part in rest[:-1]:
            accumulate_(into, part.gradient, self._threads)
        return [into, *(part.gradient for part in rest[-1:])]

    def _adam(self, entry: Entry, gradients: list[Tensor], hyper: AdamHyper) -> None:
        """Update an expert with the sum of at most two gradients."""
        number = entry.number
        if len(gradients) == 2 and not math.isfinite(self._added_squares[number].item()):
            self._squares[number] = math.nan
        if gradients and not math.isfinite(self._squares[number].item()):
            return  # the record stays as it was; step() reports it
        first, second = [*gradients, None, None][:2]
        adamw_(self._record(entry), first, hyper, self._threads, added=second)

    def _record(self, entry: Entry) -> RecordState:
        layout = self._store.memory.layout
        states = self._store.host(entry, Part.STATES)
        views = {section.name: layout.state(states, section.name) for section in layout.sections}
        return RecordState(
            layout.weights(self._store.host(entry, Part.WEIGHTS)),
            views.get("low"),
            views["exp_avg"],
            views["exp_avg_sq"],
        )

    def _finish(self, queued: _Queued) -> None:
        update, entry = queued.update, queued.update.entry
        with self._sync.lock:
            pending = self._pending[queued.key]
            pending.popleft()
            if not pending:
                del self._pending[queued.key]
            if update.hyper is not None:
                self._store.end_update(entry)
            elif update.needs & Part.GRADS:
                self._store.keep_gradient(entry)
            self._store.release(entry)

    def close(self) -> None:
        with self._sync.lock:
            self._closed = True
            self._sync.wake_updates()
        for worker in self._workers:
            if worker is not threading.current_thread():  # a finalizer may run in any thread
                worker.join()
