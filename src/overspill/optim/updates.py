"""Expert-wise updates: threads take each gradient as it arrives in host memory and run the fused
AdamW pass over that expert's record, lowest layer first, while the GPU continues.

A pass over a record ends with the slowest of its cores, and the cores are idle until the next one
begins. So several records are updated at a time, and only large ones by several cores each.
"""

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from overspill.optim.kernel import AdamHyper, RecordState, accumulate_, adamw_
from overspill.tiers.entry import Entry, Part
from overspill.tiers.guests import Guest
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.downloads import GradientRing
from overspill.transfer.outboxes import GradientPart
from overspill.transfer.streams import Inject, StreamEvent


@dataclass(frozen=True)
class Update:
    """What to do with one expert once the copy `arrived` has ended.

    A gradient in ring buffer `buffer` is added to the expert's kept gradient (`accumulate`) or used
    directly; with `use_kept` the kept gradient is used. With `hyper` the expert is updated, without
    a gradient by decay alone, with `accumulate` by the sum; without `hyper` the gradient is only
    kept.

    `parts` of a gradient, in outboxes, are added in their order, with `accumulate` to the kept one.
    `then` is called at the end.
    """

    entry: Entry
    arrived: StreamEvent
    buffer: int | None = None
    accumulate: bool = False
    use_kept: bool = False
    hyper: AdamHyper | None = None
    parts: Sequence[GradientPart] = ()
    then: Callable[[], None] | None = None

    @property
    def needs(self) -> Part:
        """The parts of the expert that must be in its host slot."""
        need = Part.WEIGHTS | Part.STATES if self.hyper is not None else Part(0)
        kept = self.accumulate or self.use_kept or (self.parts and self.hyper is None)
        return need | Part.GRADS if kept else need


_PER_CORE = 1 << 23  # parameters: a core takes about 20 ms for them


class Updates:
    """Updates experts in threads. `squares[number]` is the sum of squares of an expert's gradient,
    written by the device with the gradient, or here where gradients are accumulated;
    `added_squares[number]` that of a gradient that is added to a kept one."""

    def __init__(
        self,
        store: ExpertStore,
        squares: Tensor,
        added_squares: Tensor,
        ring: GradientRing,
        threads: int,
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        self._store = store
        self.ring = ring
        self._squares = squares
        self._added_squares = added_squares
        cores = min(threads, max(1, store.layout.shape.numel // _PER_CORE))
        count = threads // cores
        self._threads = threads // count  # of one pass
        self._recorder = recorder
        self._inject = inject
        self._arriving: deque[Update] = deque()  # downloads end in the order they were issued
        self._waiting: list[Update] = []  # arrived, but parts of the expert are still on disk
        self._ready: list[tuple[int, int, Update]] = []
        self._running: set[int] = set()  # experts; two updates of one expert must not overlap
        self._watched = False  # whether a thread waits for the first of `_arriving`
        self._order = itertools.count()
        self._closed = False
        self._workers = [
            threading.Thread(target=self._run, name="overspill-updates", daemon=True)
            for _ in range(count)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, update: Update) -> None:
        with self._store.lock:
            self._store.hold(update.entry)
            self._arriving.append(update)
            if not self._watched:  # else the thread that waits for an earlier one goes on to this
                self._store.wake_update()

    def waiting(self) -> Iterable[tuple[Entry, Part]]:
        """Under the lock: experts whose update waits for parts on disk. Those with a host slot come
        first, because it cannot be reused before their update; then lowest layer first."""
        updates = sorted(self._waiting, key=lambda u: (u.entry.host_slot is None, u.entry.number))
        return [(update.entry, update.needs) for update in updates]

    def idle(self) -> bool:
        """Under the lock: whether every submitted update was carried out."""
        return not (self._arriving or self._waiting or self._ready or self._running)

    def wait_idle(self) -> None:
        self._store.wait(self.idle, "pending expert updates (update threads)")

    def _next(self) -> Update | None:
        while self._arriving and self._arriving[0].arrived.done():
            self._waiting.append(self._arriving.popleft())
        still = []
        for update in self._waiting:
            entry = update.entry
            # a record that is being written to disk must not change during the write
            in_host = entry.host_slot is not None and not update.needs & ~entry.valid
            if (in_host or isinstance(entry, Guest)) and not entry.io:
                heapq.heappush(self._ready, (entry.number, next(self._order), update))
            else:
                still.append(update)
        self._waiting = still
        if still:
            self._store.request_transfers()
        return self._pop()

    def _pop(self) -> Update | None:
        """Takes the first ready update whose expert is not being updated."""
        skipped = []
        update = None
        while self._ready and update is None:
            first = heapq.heappop(self._ready)
            if first[0] in self._running:
                skipped.append(first)
            else:
                update = first[2]
                self._running.add(first[0])
        for one in skipped:
            heapq.heappush(self._ready, one)
        if update is not None and (self._ready or (self._arriving and not self._watched)):
            self._store.wake_update()  # another thread may take the next one, or wait for it
        return update

    def _run(self) -> None:
        try:
            while True:
                update = arriving = None
                with self._store.lock:
                    while (update := self._next()) is None:
                        if self._arriving and not self._watched:
                            self._watched, arriving = True, self._arriving[0].arrived
                            break
                        if self._closed and not self._arriving:
                            return
                        self._store.wait_updates()
                if update is not None:
                    self._carry_out(update)
                elif arriving is not None:
                    self._watch(arriving)
        except BaseException as error:  # a thread may wait for an update
            self._store.fail(error)

    def _watch(self, arriving: StreamEvent) -> None:
        """Waits for a copy; the other threads need not."""
        try:
            arriving.wait()
        finally:
            with self._store.lock:
                self._watched = False

    def _carry_out(self, update: Update) -> None:
        entry, layout = update.entry, self._store.layout
        if self._inject is not None:
            self._inject("optimizer")
        label = f"expert {entry.id.layer}.{entry.id.index}"
        with self._recorder.span("optimizer", label, layout.weight_bytes):
            kept = arrived = None
            if update.accumulate or update.use_kept:
                kept = layout.weights(self._store.host(entry, Part.GRADS))
            if update.buffer is not None:
                arrived = layout.weights(self.ring.buffers[update.buffer])
            if update.parts:
                kept, arrived = self._add_parts(update, kept)
            if update.hyper is not None:
                self._adam(entry, kept, arrived, update.hyper)
            elif kept is not None and arrived is not None:
                total = accumulate_(kept, arrived, self._threads)
                self._squares[entry.number] = total
        if update.buffer is not None:
            self.ring.give(update.buffer)
        if update.then is not None:
            update.then()
        self._finish(update)

    def _add_parts(self, update: Update, kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Adds the parts of a gradient but the last to the kept one, or to the first. What remains
        is added by the caller."""
        number, rest = update.entry.number, list(update.parts)
        finite = all(math.isfinite(part.square.item()) for part in rest)
        if kept is not None:
            self._added_squares[number] = 0.0 if finite else math.nan
            into = kept
        else:
            first = rest.pop(0)
            into = first.gradient
            self._squares[number] = first.square if finite else math.nan
            self._added_squares[number] = 0.0
            if update.hyper is None:
                into = self._store.layout.weights(self._store.host(update.entry, Part.GRADS))
                into.copy_(first.gradient)
        for part in rest[:-1]:
            accumulate_(into, part.gradient, self._threads)
        return into, rest[-1].gradient if rest else None

    def _adam(
        self, entry: Entry, kept: Tensor | None, arrived: Tensor | None, hyper: AdamHyper
    ) -> None:
        number = entry.number
        gradients = [gradient for gradient in (kept, arrived) if gradient is not None]
        if len(gradients) == 2 and not math.isfinite(self._added_squares[number].item()):
            self._squares[number] = math.nan
        if gradients and not math.isfinite(self._squares[number].item()):
            return  # the record stays as it was; step() reports it
        first, second = [*gradients, None, None][:2]
        adamw_(self._record(entry), first, hyper, self._threads, added=second)

    def _record(self, entry: Entry) -> RecordState:
        layout = self._store.layout
        states = self._store.host(entry, Part.STATES)
        views = {section.name: layout.state(states, section.name) for section in layout.sections}
        return RecordState(
            layout.weights(self._store.host(entry, Part.WEIGHTS)),
            views.get("low"),
            views["exp_avg"],
            views["exp_avg_sq"],
        )

    def _finish(self, update: Update) -> None:
        entry = update.entry
        with self._store.lock:
            self._running.remove(entry.number)
            if update.hyper is not None:
                self._store.end_update(entry)
            elif update.needs & Part.GRADS:
                self._store.keep_gradient(entry)
            self._store.release(entry)

    def close(self) -> None:
        with self._store.lock:
            self._closed = True
            self._store.wake_updates()
        for worker in self._workers:
            if worker is not threading.current_thread():  # a finalizer may run in any thread
                worker.join()
