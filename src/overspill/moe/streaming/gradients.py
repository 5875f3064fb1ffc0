"""Gradients of streamed experts: from the device into a ring buffer and straight into the expert's
update, or into the expert's own host slot, where they wait for more or for the global norm."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from overspill.compute.cpu_kernel import WeightGradient
from overspill.core.errors import BudgetError
from overspill.core.sizes import format_size
from overspill.moe.compute_trace import ComputeTrace
from overspill.moe.gradient_sink import GradientSink
from overspill.moe.layer_pass import Wave
from overspill.moe.residents.host_gradients import HostGradients
from overspill.moe.settings import Settings
from overspill.moe.streaming.device_gradients import DeviceGradients
from overspill.moe.streaming.formed_gradients import FormedGradients
from overspill.moe.streaming.gradient_copies import Gradient, GradientCopies
from overspill.moe.streaming.shared_gradients import SharedGradients
from overspill.moe.streaming.step_cursor import StepCursor
from overspill.optim.arguments import AdamHyper
from overspill.optim.gradient_norm import expert_squares, tensors_of
from overspill.optim.updates import Update
from overspill.plan.budget import Placement
from overspill.tiers.entry import Entry, Part
from overspill.tiers.slab import Progress
from overspill.tiers.store import ExpertStore
from overspill.transfer.outboxes import Outboxes
from overspill.transfer.streams import COMPLETED, CopyStream, StreamEvent, record_event

_ON_DEVICE = 8  # gradients of experts on the device at once, fewer with few slots, more with many
_RING_WHEN_KEPT = 8  # where gradients are kept, ring buffers only serve to accumulate


class StreamingGradients(GradientSink):
    """Sink of the gradients of streamed experts: copies them to host memory and starts the updates
    that they complete, in threads."""

    has_updated = False

    def __init__(
        self,
        store: ExpertStore,
        cursor: StepCursor,
        placement: Placement,
        settings: Settings,
        stream: CopyStream,
        trace: ComputeTrace,
        threads: int,
        device: torch.device,
        wait_readers: Callable[[], None],
        progress: Progress | None,
        outboxes: Outboxes | None = None,
        end_cpu_job: Callable[[], None] = lambda: None,
    ) -> None:
        """`wait_readers` blocks until no copy or computation reads weights in host memory,
        `end_cpu_job` until the CPU computes no experts. Ranks that compute experts of each other
        have `outboxes`."""
        self._store = store
        self._sync = store.sync
        self._places = store.places
        self._wait_readers = wait_readers
        self._cursor = cursor
        self._placement = placement
        self.overlap_updates = settings.overlap_updates
        self._trace = trace
        self._device = device
        # the gradients of a layer are downloaded while the next one computes
        on_device = max(min(_ON_DEVICE, placement.slots), placement.slots // 2)
        limit = on_device * store.memory.layout.weight_bytes
        self.copies = GradientCopies(store, stream, limit, threads, progress)
        self.host_gradients = HostGradients(
            store.memory.layout,
            device,
            lambda: _unused_memory(store),
            self.copies.downloads,
            stream.inject,
        )
        self.on_device = DeviceGradients(store.memory.layout, device)
        # experts whose host slot holds part of this step's gradient, and when it has arrived
        self._kept: dict[int, StreamEvent] = {}
        self.formed = FormedGradients(store, self.copies, self._kept, end_cpu_job)
        # whether a gradient was not finite that was or will be added to others, if there was one
        self._not_finite = torch.zeros((), dtype=torch.bool, device=device)
        self._has_added = False
        self._shared = SharedGradients(outboxes, store.places)

    # -- memory -----------------------------------------------------------------------------

    def allocate(self, keep: bool) -> None:
        if keep:
            self._allocate_kept()
        ring = self._placement.ring
        self.copies.start_updates(min(_RING_WHEN_KEPT, ring) if keep else ring)

    def _allocate_kept(self) -> None:
        """Allocate memory for kept gradients, once."""
        if Part.GRADS in self._store.memory.slabs:
            return
        kept = self._places.host_slots * self._store.memory.layout.weight_bytes
        need = self.host_bytes() + kept + self._placement.reserved
        if need > self._placement.host_memory:
            raise BudgetError(
                f"gradients that wait for clipping or accumulation need --host-memory "
                f"{format_size(need)} in all, it is {format_size(self._placement.host_memory)}; "
                "raise it, offload with keep_gradients=True and a --disk folder, or train without "
                "them (max_grad_norm=None)"
            )
        self._store.allocate(Part.GRADS)

    def reset_states(self) -> None:
        self.wait()
        for layer in range(self._places.n_layers):
            for entry in self._places.streamed(layer):
                self._store.write_part(entry, Part.STATES, _zero)

    def host_bytes(self) -> int:
        """Host memory of all slabs."""
        return self._store.memory.host_bytes + self.copies.updates.ring.buffers.nbytes

    # -- gradients --------------------------------------------------------------------------

    def add(
        self,
        layer: int,
        wave: Wave,
        dw: Sequence[Tensor],
        hyper: AdamHyper | None,
        more: bool = False,
    ) -> None:
        self._trace.end_wave()  # before the host may have to wait for a buffer
        dw = [part.to(self._store.memory.layout.dtype) for part in dw]
        assert wave.counts is not None
        offsets = {
            o: self._places.at(layer, wave.first + o) for o, n in enumerate(wave.counts) if n
        }
        outbox = self._shared.slots(offsets)
        if not more:
            for offset, entry in offsets.items():
                if entry.number in self.on_device and offset not in outbox:
                    self.on_device.add_to(entry.number, [part[offset] for part in dw])
        squares = expert_squares(dw)
        if more or any(entry.number in self._kept for entry in offsets.values()):
            self._has_added = True
            self._not_finite |= ~torch.isfinite(squares.sum())
        made = record_event(self._device)  # the gradients are complete on the compute stream here
        finished: list[int] = []
        for offset, entry in offsets.items():
            parts = [part[offset] for part in dw]
            gradient = Gradient(entry, parts, squares[offset], made)
            in_host = entry.number in self._kept
            if (slot := outbox.get(offset)) is not None:
                arrived = self.copies.to_outbox(gradient, slot)
                self.copies.updates.submit(self._shared.publication(entry, slot, arrived))
            elif not (more and not in_host and self.on_device.add(entry.number, parts)):
                self._send(gradient, hyper)
            finished.append(self._places.position(entry))
            if entry.disk_slot is not None:  # the next expert may wait for its host slot
                self._finish(finished)
        self._finish(finished)

    # -- gradients that the CPU makes ---------------------------------------------------------

    def place(
        self, layer: int, rows: Mapping[int, int], updates: bool, more: bool
    ) -> dict[int, WeightGradient]:
        """Return the memory where the CPU leaves the gradients of experts with these token rows, by
        position. With `updates` they will complete the step's gradient, and the experts may be
        updated then; `more` as in `add`. Waits until nothing else uses the memory."""
        entries = {position: self._places.at(layer, position) for position in rows}
        if not more:
            self._leave_device({entry.number for entry in entries.values()})
        if not updates:
            self._allocate_kept()
        return self.formed.place(entries, rows)

    def add_formed(self, end: StreamEvent, hyper: AdamHyper | None) -> None:
        """Take the gradients of the last `place`, which are complete at `end`."""
        placed = self.formed.take(end)
        for entry, buffer, factors in placed:
            if hyper is None:
                self._kept[entry.number] = end
                continue
            if buffer is not None:
                self._submit(Update(entry, end, buffer, factors=factors, hyper=hyper))
            else:
                self._kept[entry.number] = end
                self._update(entry, hyper)
            self._kept.pop(entry.number, None)  # it is used now
        self._finish([self._places.position(entry) for entry, _, _ in placed])

    # -- gradients that other ranks compute ---------------------------------------------------

    def begin_backward(self, shared: Mapping[int, tuple[int, ...]]) -> None:
        self._shared.begin(shared)

    def collect(self, layer: int, hyper: AdamHyper | None) -> None:
        for update in self._shared.updates(layer, hyper, self._take_kept):
            self._submit(update)

    def _take_kept(self, entry: Entry) -> StreamEvent | None:
        self._leave_device({entry.number})
        self.formed.form([entry.number])
        return self._kept.pop(entry.number, None)

    def _finish(self, positions: list[int]) -> None:
        with self._sync.lock:
            self._cursor.finish(positions)
        positions.clear()

    def _leave_device(self, numbers: Collection[int]) -> None:
        """Move finished sums of these experts from the device to host memory."""
        for number in self.on_device.numbers(numbers):
            parts = self.on_device.take(number)
            (square,) = expert_squares([part[None] for part in parts])
            made = record_event(self._device)
            self._send(Gradient(self._places.entries[number], parts, square, made), None)

    def _send(self, gradient: Gradient, hyper: AdamHyper | None) -> None:
        entry, number = gradient.entry, gradient.entry.number
        kept = number in self._kept
        if hyper is None and not kept:
            self._allocate_kept()
            self._kept[number] = self.copies.to_host_slot(gradient)
            return
        buffer, arrived = self.copies.to_ring(gradient, kept)
        factors = self.formed.take_factors(number)
        self._submit(Update(entry, arrived, buffer, kept, hyper=hyper, factors=factors))
        if hyper is not None:
            self._kept.pop(number, None)  # it is used now

    # -- a layer, a step --------------------------------------------------------------------

    def wait_readers(self) -> None:
        self._wait_readers()

    def complete(self, layer: int, counts: Sequence[int] | None, hyper: AdamHyper | None) -> None:
        if counts is None:
            # In step(), not in backward: a forward without gradients may still be running.
            self.wait_readers()
        self._leave_device({entry.number for entry in self._places.layer_entries(layer)})
        for position, entry in enumerate(
            self._places.streamed(layer), self._places.residents[layer]
        ):
            if hyper is None:
                self._store.begin_update(entry)
            elif entry.number not in self._shared.updated and (
                counts is None or entry.number in self._kept or not counts[position]
            ):
                self._update(entry, hyper)

    def _update(self, entry: Entry, hyper: AdamHyper) -> None:
        """Update an expert with its kept gradient, or by decay."""
        arrived = self._kept.get(entry.number)
        kept, factors = arrived is not None, self.formed.take_factors(entry.number)
        update = Update(entry, arrived or COMPLETED, use_kept=kept, hyper=hyper, factors=factors)
        self._submit(update)

    def _submit(self, update: Update) -> None:
        """Let an update thread update an expert, or without `hyper` add to its kept gradient."""
        if update.hyper is None:
            self._allocate_kept()
            self._kept[update.entry.number] = update.arrived
        else:
            self.has_updated = True
            self._store.begin_update(update.entry)
        self.copies.updates.submit(update)

    def squares(self) -> dict[int, float]:
        self._leave_device(range(len(self._places.entries)))
        self.formed.measure()
        self._settle()
        kept = sorted(self._kept)
        return dict(zip(kept, self.copies.squares[kept].tolist(), strict=True))

    def kept(self) -> Collection[int]:
        self._leave_device(range(len(self._places.entries)))
        self.formed.form(self._kept.keys())
        self._settle()
        return self._kept.keys()

    def change_kept(self, number: int, change: Callable[[Tensor], None]) -> None:
        store, entry, is_kept = self._store, self._places.entries[number], number in self._kept
        grad = torch.zeros(store.memory.layout.shape.numel, dtype=store.memory.layout.dtype)
        if is_kept:
            with self._sync.lock:  # the host slot must not be reused
                self._sync.wait(lambda: not entry.io, "disk transfers of a kept gradient")
                grad.copy_(store.memory.layout.weights(store.read_part(entry, Part.GRADS)))
        change(grad)  # without the lock, because it waits for other nodes
        self._allocate_kept()

        def fill(memory: Tensor) -> None:
            store.memory.layout.weights(memory).copy_(grad)

        store.write_part(entry, Part.GRADS, fill)
        (self.copies.squares[number],) = expert_squares(
            tensors_of(grad[None], store.memory.layout.shape)
        )
        self._kept.setdefault(number, COMPLETED)

    def _settle(self) -> None:
        """Wait until the step's gradients have left the device and are accumulated."""
        self.formed.end.wait()
        if self._kept:
            self.copies.wait()
        else:
            self.copies.downloads.wait()

    def check(self, kept: Mapping[int, AdamHyper]) -> None:
        self.copies.downloads.wait()
        self.formed.end.wait()
        if not self._shared.are_finite() or (self._has_added and self._not_finite.item()):
            self.copies.updates.wait_idle()  # which sums are not finite is known then
        if kept:
            self.copies.check_finite()

    def step(self, kept: Mapping[int, AdamHyper]) -> None:
        self._shared.forget()
        for layer, hyper in sorted(kept.items()):
            with self._sync.lock:  # once, although update threads want it
                for entry in self._places.streamed(layer):
                    self._update(entry, hyper)
        self._kept.clear()
        self._forget_added()
        self.has_updated = False
        if not self.overlap_updates:
            self.wait()
        self.copies.check_finite()

    def discard(self, layer: int | None = None) -> None:
        store = self._store
        self._sync.wake_all()  # an interrupt may have come before a thread was woken
        self.formed.drop_placed()
        self.wait()  # a gradient that is being accumulated must not come later
        dropped = self._places.entries if layer is None else self._places.layer_entries(layer)
        numbers = {entry.number for entry in dropped}
        with self._sync.lock:
            pending = [e for e in self._places.entries if e.stale and e.number not in numbers]
            store.discard_gradients(self._kept.keys() & numbers)
            for entry in pending:  # the gradients of other layers still wait for step()
                store.begin_update(entry)
        # an expert without tokens in the next step would keep a NaN
        self.copies.squares[sorted(numbers)] = 0.0
        for number in self._kept.keys() & numbers:
            del self._kept[number]
        self.formed.discard(numbers)
        self.on_device.discard(numbers)
        self._shared.forget()  # all have arrived
        self.host_gradients.discard(numbers)  # also if a new optimizer keeps none there
        if not self._kept:
            self._forget_added()
        if layer is None:
            self.copies.updates.ring.reset()  # an interrupted backward may have left buffers
            self.has_updated = False

    def _forget_added(self) -> None:
        if self._has_added:
            self._not_finite.zero_()
            self._has_added = False

    # -- lifetime ---------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits until all gradients have arrived and all updates are done."""
        self.formed.end.wait()
        self.copies.wait()

    def check_conserved(self) -> None:
        self.on_device.check_conserved()
        self.copies.updates.ring.check_conserved()
        self._shared.check_conserved()

    def close(self) -> None:
        self.on_device.close()
        self.host_gradients.close()
        self._shared.stop()
        self.copies.close()
        self._shared.close()


def _unused_memory(store: ExpertStore) -> list[Tensor]:
    """Return the gradient memory of the free host slots, until residents are changed. There must be
    no experts on disk, which would use it."""
    assert not store.places.disk_slots
    slab = store.memory.slabs[Part.GRADS]
    return [slab[slot] for slot in store.places.free_slots]


def _zero(memory: Tensor) -> None:
    memory.zero_()
