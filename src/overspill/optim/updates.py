"""Expert-wise updates: one thread takes each gradient as it lands in host memory and runs the fused
AdamW pass over that expert's record, lowest layer first, while the GPU goes on."""

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from overspill.optim.kernel import AdamHyper, RecordState, accumulate_, adamw_
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.gradients import GradientRing
from overspill.transfer.lanes import Inject, Mark
from overspill.transfer.stager import Stager


@dataclass(frozen=True)
class Update:
    """What to do with one expert once `landed` has passed.

    A gradient in ring buffer `ring` is added to the expert's kept gradient (`into_row`) or used
    as it is; with `from_row` the kept gradient is used. With `hyper` the expert is updated, with
    zero if there is no gradient; without, the gradient only waits for more.
    """

    entry: Entry
    landed: Mark
    ring: int | None = None
    into_row: bool = False
    from_row: bool = False
    hyper: AdamHyper | None = None

    @property
    def parts(self) -> Part:
        """What of the expert must be in its host row."""
        need = Part.WEIGHTS | Part.STATES if self.hyper is not None else Part(0)
        return need | Part.GRADS if self.into_row or self.from_row else need


class Updates:
    """The update thread. `squares[number]` is the sum of squares of each expert's gradient, written
    by the device with the gradient, or here where gradients are added up."""

    def __init__(
        self,
        store: ExpertStore,
        squares: Tensor,
        threads: int,
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        self.store = store
        self.ring: GradientRing | None = None
        self.stager: Stager | None = None
        self.squares = squares
        self.threads = threads
        self.recorder = recorder
        self.inject = inject
        self._landing: deque[Update] = deque()  # downloads end in the order they were issued
        self._waiting: list[Update] = []  # landed, but parts of the expert are still on disk
        self._ready: list[tuple[int, int, Update]] = []
        self._order = itertools.count()
        self._outstanding = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="overspill-updates", daemon=True)
        self._thread.start()

    def submit(self, update: Update) -> None:
        with self.store.lock:
            update.entry.queued += 1
            self._outstanding += 1
            self._landing.append(update)
            self.store.wake_updates.notify()

    def waiting(self) -> Iterable[tuple[Entry, Part]]:
        """Under the lock: experts whose update waits for parts on disk. Those that hold a row come
        first, because it cannot be given to anyone before their update; then lowest layer first."""
        updates = sorted(self._waiting, key=lambda u: (u.entry.row is None, u.entry.number))
        return [(update.entry, update.parts) for update in updates]

    def idle(self) -> bool:
        """Under the lock: whether every submitted update has been carried out."""
        return self._outstanding == 0

    def wait_idle(self) -> None:
        with self.store.lock:
            self.store.wait_main(self.idle)

    def _next(self) -> Update | None:
        while self._landing and self._landing[0].landed.done():
            self._waiting.append(self._landing.popleft())
        still = []
        for update in self._waiting:
            entry = update.entry
            # a row that is being written back must not change under the write
            if entry.row is not None and not update.parts & ~entry.have and not entry.io:
                heapq.heappush(self._ready, (entry.number, next(self._order), update))
            else:
                still.append(update)
        self._waiting = still
        if still and self.stager is not None:
            self.stager.pump()
        return heapq.heappop(self._ready)[2] if self._ready else None

    def _run(self) -> None:
        try:
            while True:
                with self.store.lock:
                    update = self._next()
                    while update is None and not self._landing:
                        if self._closed:
                            return
                        self.store.wake_updates.wait()
                        update = self._next()
                    landing = self._landing[0].landed if update is None else None
                if landing is not None:
                    landing.wait()
                elif update is not None:
                    self._carry_out(update)
        except BaseException as error:  # whoever waits for an update must hear of it
            self.store.fail(error)

    def _carry_out(self, update: Update) -> None:
        entry, layout = update.entry, self.store.layout
        if self.inject is not None:
            self.inject("optimizer")
        with self.recorder.span(
            "optimizer", f"expert {entry.id.layer}.{entry.id.index}", layout.weight_bytes
        ):
            gradient: Tensor | None = None
            if update.into_row or update.from_row:
                gradient = layout.weights(self.store.host(entry, Part.GRADS))
            if update.ring is not None:
                assert self.ring is not None
                arrived = layout.weights(self.ring.buffers[update.ring])
                if update.into_row and gradient is not None:
                    total = accumulate_(gradient, arrived, self.threads)
                    self.squares[entry.number] = total
                else:
                    gradient = arrived
            if update.hyper is not None:
                self._adam(entry, gradient, update.hyper)
        if update.ring is not None and self.ring is not None:
            self.ring.give(update.ring)
        self._finish(update)

    def _adam(self, entry: Entry, gradient: Tensor | None, hyper: AdamHyper) -> None:
        if gradient is not None and not math.isfinite(self.squares[entry.number].item()):
            return  # the record stays as it was; step() tells of it
        adamw_(self._record(entry), gradient, hyper, self.threads)

    def _record(self, entry: Entry) -> RecordState:
        layout = self.store.layout
        states = self.store.host(entry, Part.STATES)
        views = {section.name: layout.state(states, section.name) for section in layout.sections}
        return RecordState(
            layout.weights(self.store.host(entry, Part.WEIGHTS)),
            views.get("low"),
            views["exp_avg"],
            views["exp_avg_sq"],
        )

    def _finish(self, update: Update) -> None:
        entry = update.entry
        with self.store.lock:
            entry.queued -= 1
            self._outstanding -= 1
            on_disk = entry.disk_row is not None
            if update.hyper is not None:
                entry.stale = False
                if on_disk:
                    entry.dirty |= Part.WEIGHTS | Part.STATES
                    # the gradient is used up: it need not be written back
                    entry.dirty &= ~Part.GRADS
                    entry.have &= ~Part.GRADS
                self.store.wake_loader.notify()
            elif update.into_row and on_disk:
                entry.dirty |= Part.GRADS
            if on_disk and self.stager is not None:
                self.stager.pump()
            self.store.wake_main.notify_all()

    def close(self) -> None:
        with self.store.lock:
            self._closed = True
            self.store.wake_updates.notify_all()
        if self._thread is not threading.current_thread():  # a finalizer may run in any thread
            self._thread.join()
