"""The way of a gradient: off the device into a ring buffer and straight into its expert's update,
or into the expert's own row, where it waits for more of it or for the global norm."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from overspill.core.errors import BudgetError
from overspill.core.sizes import format_size
from overspill.optim.kernel import AdamHyper
from overspill.optim.updates import Update, Updates
from overspill.plan.budget import PROCESS, Placement
from overspill.tiers.slab import HostSlab, Progress
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.transfer.gradients import Downloads, GradientRing
from overspill.transfer.lanes import PASSED, Lane, Mark
from overspill.transfer.stager import Stager

_IN_FLIGHT = 8  # gradients of experts on the device at once, fewer with few slots
_RING_WHEN_KEPT = 8  # where gradients are kept, buffers only serve to add up micro-batches


class Gradients:
    """Carries gradients to host memory and starts the updates they complete."""

    def __init__(
        self,
        store: ExpertStore,
        placement: Placement,
        lane: Lane,
        updates: Updates,
        stager: Stager | None,
    ) -> None:
        self.store = store
        self.placement = placement
        self.updates = updates
        self.stager = stager
        self.squares = updates.squares
        in_flight = min(_IN_FLIGHT, placement.slots)
        self.downloads = Downloads(lane, in_flight * store.layout.weight_bytes)
        self.ring: GradientRing | None = None
        self._kept: set[int] = set()  # numbers of experts whose row holds some of this step's

    def take_memory(self, keep: bool, progress: Progress | None) -> None:
        """The ring, and with `keep` a row for every expert's gradient; once each."""
        if keep:
            self.take_rows()
        if self.ring is None:
            count = min(_RING_WHEN_KEPT, self.placement.ring) if keep else self.placement.ring
            size = self.store.layout.weight_bytes
            slab = HostSlab("gradient buffers", count, size, self.store.pinned, progress)
            self.ring = self.updates.ring = GradientRing(self.store, slab)

    def take_rows(self) -> None:
        """Memory for gradients that wait, once."""
        with self.store.lock:  # gradients of the device and of the CPU may both be the first
            if Part.GRADS not in self.store.slabs:
                self._take_rows_once()

    def _take_rows_once(self) -> None:
        rows = self.store.home_rows + self.store.cache_rows
        need = self.host_bytes() + rows * self.store.layout.weight_bytes + PROCESS
        if need > self.placement.host_memory:
            raise BudgetError(
                f"gradients that wait for clipping or accumulation need --host-memory "
                f"{format_size(need)} in all, it is {format_size(self.placement.host_memory)}; "
                "raise it, offload with keep_gradients=True and a --disk folder, or train without "
                "them (max_grad_norm=None)"
            )
        self.store.take(Part.GRADS)

    def host_bytes(self) -> int:
        """Host memory of all slabs."""
        return self.store.host_bytes() + (0 if self.ring is None else self.ring.buffers.nbytes)

    # -- one expert's gradient ------------------------------------------------------------

    def send(
        self,
        entry: Entry,
        gradient: Sequence[Tensor],
        square: Tensor,
        made: Mark,
        hyper: AdamHyper | None,
    ) -> None:
        """Takes the tensors of a gradient and its sum of squares once `made` has passed. With
        `hyper` it completes the step's gradient: the update may start as soon as it has landed."""
        if hyper is not None and entry.number not in self._kept:
            ring, landed = self._through_ring(entry, gradient, square, made)
            self._outdate(entry)
            self.updates.submit(Update(entry, landed, ring, hyper=hyper))
            return
        self.take_rows()
        if entry.number in self._kept:
            ring, landed = self._through_ring(entry, gradient, square, made)
            self.updates.submit(Update(entry, landed, ring, into_row=True))
        else:
            self._into_row(entry, gradient, square, made)
            self._kept.add(entry.number)

    def make(self, entry: Entry, write: Callable[[Tensor], float], hyper: AdamHyper | None) -> None:
        """As `send`, for a gradient that is made on the host: `write` puts it into the memory it is
        given and returns its sum of squares. The expert's weights are not read any more then."""
        layout = self.store.layout
        if hyper is not None or entry.number in self._kept:
            adds = entry.number in self._kept
            assert self.ring is not None
            ring = self.ring.take()
            self.squares[entry.number] = write(layout.weights(self.ring.buffers[ring]))
            if not adds:
                self._outdate(entry)
            update = Update(entry, PASSED, ring, into_row=adds, hyper=None if adds else hyper)
            self.updates.submit(update)
            return
        self.take_rows()
        with self.store.lock:
            row = self.store.host(entry, Part.GRADS)
            if entry.disk_row is not None:
                entry.have |= Part.GRADS
                entry.dirty |= Part.GRADS
        self.squares[entry.number] = write(layout.weights(row))
        self._kept.add(entry.number)

    def _through_ring(
        self, entry: Entry, gradient: Sequence[Tensor], square: Tensor, made: Mark
    ) -> tuple[int, Mark]:
        assert self.ring is not None
        ring = self.ring.take()
        return ring, self._download(entry, gradient, square, self.ring.buffers[ring], made)

    def _into_row(
        self, entry: Entry, gradient: Sequence[Tensor], square: Tensor, made: Mark
    ) -> None:
        with self.store.lock:
            if entry.row is None and self.stager is not None:
                self.stager.pump()
            self.store.wait_main(lambda: entry.row is not None)
            entry.queued += 1  # from here on the row stays, whoever asks for one
            row = self.store.host(entry, Part.GRADS)
            if entry.disk_row is not None:
                entry.have |= Part.GRADS
                entry.dirty |= Part.GRADS
        landed = self._download(entry, gradient, square, row, made)
        self.updates.submit(Update(entry, landed))  # lets the row go once it has landed
        with self.store.lock:
            entry.queued -= 1

    def _download(
        self, entry: Entry, gradient: Sequence[Tensor], square: Tensor, row: Tensor, made: Mark
    ) -> Mark:
        flat = self.store.layout.weights(row)
        starts = self.store.layout.shape.starts
        pairs = [
            (flat[start : start + part.numel()], part.reshape(-1))
            for start, part in zip(starts, gradient, strict=True)
        ]
        pairs.append((self.squares[entry.number], square))
        return self.downloads.send(pairs, f"expert {entry.id.layer}.{entry.id.index}", made)

    def _outdate(self, entry: Entry) -> None:
        """The gradient is complete: the weights, here and on the device, are of the past."""
        with self.store.lock:
            entry.stale = True
            entry.version += 1

    # -- a layer's, a step's ----------------------------------------------------------------

    def complete(self, entry: Entry, tokens: int, hyper: AdamHyper | None) -> None:
        """The expert's layer is done. With `hyper` what was kept of its gradient, or its decay if
        it got no tokens, updates it now; without, at the end of the step."""
        if hyper is None:
            self._outdate(entry)
        elif entry.number in self._kept or not tokens:
            self._outdate(entry)
            self._update(entry, hyper)

    def update(self, entries: Iterable[Entry], hyper: AdamHyper | None) -> None:
        """Updates experts with what was kept, or lets them decay."""
        for entry in entries:
            self._update(entry, hyper)

    def _update(self, entry: Entry, hyper: AdamHyper | None) -> None:
        kept = entry.number in self._kept
        self.updates.submit(Update(entry, PASSED, from_row=kept, hyper=hyper))

    def settle(self, kept: bool) -> None:
        """Waits until the step's gradients have left the device and, if `kept`, are added up."""
        self.downloads.wait()
        if kept:
            self.updates.wait_idle()

    def sum_of_squares(self) -> float:
        kept = sorted(self._kept)
        return float(self.squares[kept].to(torch.float64).sum()) if kept else 0.0

    def holds_any(self) -> bool:
        """Whether a row holds some of this step's gradient."""
        return bool(self._kept)

    def end_step(self) -> None:
        self._kept.clear()

    def discard(self) -> None:
        """Throws kept gradients away; the experts stay as they are."""
        with self.store.lock:
            for entry in self.store.entries:
                if not entry.queued:
                    entry.stale = False
                if entry.number in self._kept and entry.disk_row is not None:
                    entry.have &= ~Part.GRADS
                    entry.dirty &= ~Part.GRADS
            self.store.wake_loader.notify()
        self._kept.clear()

    def check_conserved(self) -> None:
        if self.ring is not None:
            self.ring.check_conserved()

    def close(self) -> None:
        if self.ring is not None:
            self.ring.buffers.close()
