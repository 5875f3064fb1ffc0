"""Experts streamed from host memory and disk through slots of the compute device."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from overspill.core.errors import BudgetError, NonFiniteError, OrderError
from overspill.core.experts import ExpertId, Phase
from overspill.core.sizes import format_size
from overspill.hardware.machine import usable_cores
from overspill.moe.engine import Engine, LayerPass, Settings, UpdateRule, Wave
from overspill.optim.updates import Update, Updates
from overspill.plan.banks import Chunk, assign_banks, bank_size
from overspill.plan.budget import PROCESS, Placement
from overspill.plan.order import Position, upcoming
from overspill.plan.pinning import choose_pinned, place_pinned
from overspill.plan.waves import Candidate, next_wave
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import HostSlab, Progress, device_slab
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.gradients import Downloads, GradientRing
from overspill.transfer.lanes import PASSED, Lane, Mark, compute_mark, compute_waits
from overspill.transfer.loader import Loader
from overspill.transfer.stager import Stager

TraceStart = torch.cuda.Event | int | None
"""Where a traced computation began: an event on the compute stream, or the host's clock."""

_SSD_WORKERS = 4  # for reads, and as many for writes
_DOWNLOADS_IN_FLIGHT = 8  # gradients of experts on the device at once


class StreamingEngine(Engine):
    """Uploads run ahead of compute along the known order of the step, gradients leave as they are
    made, updates run while the device goes on, and the next upload of an expert waits for its own
    update and nothing else."""

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        layout: RecordLayout,
        device: torch.device,
        placement: Placement,
        settings: Settings,
        recorder: Recorder,
        disk: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(n_layers, n_experts, layout, device, placement, settings, recorder)
        self.progress = progress
        pinned = device.type == "cuda"
        self.store = ExpertStore(
            n_layers,
            n_experts,
            layout,
            placement.home_rows,
            placement.cache_rows,
            pinned,
            disk,
            progress,
        )
        self.bank_size = bank_size(placement.banked, n_experts)
        n_banks = placement.banked // self.bank_size
        self._banks: list[Chunk | None] = [None] * n_banks
        self._pinned: dict[ExpertId, int] = {}
        self._pin_slots = range(n_banks * self.bank_size, placement.slots)
        slab = device_slab(placement.slots, layout.weight_bytes, device)
        self._slot_weights = layout.weights(slab)
        inject = settings.inject
        self.loader = Loader(
            self.store,
            slab,
            Lane("upload", device, recorder, inject),
            placement.slots,
        )
        self.loader.overlap = settings.overlap_uploads
        limit = _DOWNLOADS_IN_FLIGHT * layout.weight_bytes
        self.downloads = Downloads(Lane("download", device, recorder, inject), limit)
        self.squares = torch.zeros(n_layers * n_experts, pin_memory=pinned)
        threads = settings.threads or max(1, usable_cores() - 4, usable_cores() * 3 // 4)
        self.updates = Updates(self.store, self.squares, threads, recorder, inject)
        self.stager: Stager | None = None
        if self.store.disk_rows:
            self.stager = Stager(self.store, self._needs, _SSD_WORKERS, recorder, inject)
            self.updates.stager = self.stager
            self.loader.row_read = self.stager.pump
        self.ring: GradientRing | None = None
        self._here = Position(0, Phase.FORWARD)
        self._passed: set[int] = set()  # experts that the current pass of the layer is done with
        self._here_counts: Sequence[int] = [1] * n_experts  # tokens of that pass
        self._training = True
        # tokens of each layer's experts in its last forward, and summed over this step
        self._last_counts: list[list[int] | None] = [None] * n_layers
        self._step_tokens = [[0] * n_experts for _ in range(n_layers)]
        self._kept: set[int] = set()  # numbers of experts that hold a kept gradient of this step
        self._dense_since: TraceStart = None
        self._wave_since: tuple[str, TraceStart] = ("", None)
        self._closed = False

    # -- waves ----------------------------------------------------------------------------

    def needs_counts(self, rows: int) -> bool:
        return True  # which experts are uploaded depends on them

    def waves(self, layer_pass: LayerPass, phase: Phase) -> Iterator[Wave]:
        layer, counts = layer_pass.layer, layer_pass.counts
        permutation = layer_pass.permutation
        assert permutation is not None
        if phase is Phase.FORWARD:
            self._count(layer, counts)
        starts = [0, *itertools.accumulate(counts)]
        self._trace_dense()
        self._passed = set()
        for part in range(-(-self.n_experts // self.bank_size)):
            pending = [i for i in self._chunk_experts(part) if counts[i]]
            if not pending:
                continue
            self._focus(layer, phase, part, counts)
            while pending:
                run, slots, marks = self._await_wave(layer, pending, counts)
                for mark in marks:
                    compute_waits(self.device, mark)  # the compute stream itself, not the host
                first, stop = run[0], run[-1] + 1
                start, end = starts[first], starts[stop]
                self._wave_since = (
                    f"{phase.value} {layer}.{first}-{stop - 1}",
                    self._trace_start(),
                )
                yield Wave(
                    first,
                    stop,
                    start,
                    end,
                    self._slot_weights[slots[0] : slots[-1] + 1],
                    permutation.ends_E[first:stop] - start,
                    counts[first:stop],
                )
                self._trace_wave()
                used = compute_mark(self.device)
                with self.store.lock:
                    for slot in slots:
                        self.loader.slots[slot].free = used
                    self._passed.update(run)
                pending = pending[len(run) :]
        self._dense_since = self._trace_start()

    def _await_wave(
        self, layer: int, pending: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[int], list[int], list[Mark]]:
        """Blocks until the first of `pending` is on its way to its slot, then takes as many as may
        compute with it: (indices, slots, ends of their uploads)."""
        with self.store.lock:
            first = self._entry(layer, pending[0])
            if (
                first.stale
                and layer in self._final
                and self.rule is not None
                and self.rule.keep_gradients
            ):
                raise OrderError(
                    "forward before step(): the gradients of the last backward are still waiting; "
                    "call opt.step() (or opt.zero_grad() to drop them) first"
                )
            slot_of = {index: self._slot(layer, index) for index in pending}
            loader = self.loader
            self.store.wait_main(lambda: loader.fresh(first, slot_of[pending[0]]))
            candidates = []
            for index in pending:
                slot = slot_of[index]
                here = loader.fresh(self._entry(layer, index), slot)
                arrived = here and loader.slots[slot].ready.done()
                candidates.append(Candidate(index, slot, counts[index], here, arrived))
            number = next_wave(candidates, self.placement.max_rows, self.settings.waves)
            run = list(pending[:number])
            marks = [loader.slots[slot_of[index]].ready for index in run]
            slots = list(range(slot_of[run[0]], slot_of[run[-1]] + 1))
            return run, slots, marks

    def _entry(self, layer: int, index: int) -> Entry:
        return self.store.entry(ExpertId(layer, index))

    def _chunk_experts(self, part: int) -> range:
        return range(part * self.bank_size, min((part + 1) * self.bank_size, self.n_experts))

    def _slot(self, layer: int, index: int) -> int:
        pinned = self._pinned.get(ExpertId(layer, index))
        if pinned is not None:
            return pinned
        part, place = divmod(index, self.bank_size)
        return self._banks.index(Chunk(layer, part)) * self.bank_size + place

    def _count(self, layer: int, counts: list[int]) -> None:
        self._training = torch.is_grad_enabled()
        self._last_counts[layer] = counts
        if self._training:
            tokens = self._step_tokens[layer]
            self._step_tokens[layer] = [a + b for a, b in zip(tokens, counts, strict=True)]

    # -- what comes next ------------------------------------------------------------------

    def _focus(self, layer: int, phase: Phase, part: int, counts: Sequence[int]) -> None:
        """Tells the loader and the stager that this chunk is needed now, and what follows it."""
        with self.store.lock:
            self._here, self._here_counts = Position(layer, phase), counts
            needed = self._needed_chunks(part)
            self._banks, order = assign_banks(self._banks, needed)
            targets = []
            for chunk in order:
                expected = counts if chunk.layer == layer else self._last_counts[chunk.layer]
                for index in self._chunk_experts(chunk.part):
                    if expected is None or expected[index]:
                        slot = self._slot(chunk.layer, index)
                        targets.append((self._entry(chunk.layer, index), slot))
            self.loader.set_targets(targets)
            if self.stager is not None:
                self.stager.pump()

    def _needed_chunks(self, part: int) -> Iterator[Chunk]:
        parts = range(-(-self.n_experts // self.bank_size))
        yield Chunk(self._here.layer, part)
        if not self.settings.overlap_uploads:
            return
        for position in upcoming(self._here, self.n_layers, self._training):
            rest = parts[part + 1 :] if position == self._here else parts
            for number in rest:
                yield Chunk(position.layer, number)

    def _needs(self) -> Iterator[tuple[Entry, Part]]:
        """What the stager should have in host rows: pending updates, then the known order."""
        yield from self.updates.waiting()
        immediate = self.rule is not None and not self.rule.keep_gradients
        for position in upcoming(self._here, self.n_layers, self._training):
            parts = Part.WEIGHTS
            if position.phase is Phase.BACKWARD and immediate and not self.accumulating:
                parts |= Part.STATES
            here = position == self._here
            expected = self._here_counts if here else self._last_counts[position.layer]
            busy = [i for i in range(self.n_experts) if expected is None or expected[i]]
            idle = [i for i in range(self.n_experts) if i not in busy]
            # those that only decay come after: the pass does not wait for them, and with few rows
            # they would keep out the ones it waits for
            for index in busy + (idle if parts & Part.STATES else []):
                if not (here and index in self._passed):
                    yield self._entry(position.layer, index), parts

    # -- gradients ------------------------------------------------------------------------

    def deliver(self, layer_pass: LayerPass, wave: Wave, dw_in: Tensor, dw_out: Tensor) -> None:
        layer = layer_pass.layer
        self._trace_wave()  # before the host may have to wait for a buffer
        dw_in, dw_out = dw_in.to(self.dtype), dw_out.to(self.dtype)
        norms = torch.stack(
            [
                torch.linalg.vector_norm(dw.flatten(1), dim=1, dtype=torch.float32)
                for dw in (dw_in, dw_out)
            ]
        )
        squares = norms.square_().sum(0)
        made = compute_mark(self.device)  # the gradients are complete on the compute stream here
        assert wave.counts is not None
        for place, count in enumerate(wave.counts):
            if count:
                entry = self._entry(layer, wave.first + place)
                self._send(entry, (dw_in[place], dw_out[place], squares[place]), made)
                with self.store.lock:
                    self._passed.add(entry.id.index)

    def _send(self, entry: Entry, gradient: tuple[Tensor, Tensor, Tensor], made: Mark) -> None:
        assert self.rule is not None
        layer = entry.id.layer
        final = self.is_final(layer)
        name = f"expert {layer}.{entry.id.index}"
        if final and not self.rule.keep_gradients and entry.number not in self._kept:
            ring, buffer = self._take_buffer()
            landed = self.downloads.send(self._pairs(entry, gradient, buffer), name, made)
            self._outdate(entry)
            self.updates.submit(Update(entry, landed, ring, hyper=self.rule.hyper(layer)))
            return
        self._keep_gradients()
        if entry.number in self._kept:
            ring, buffer = self._take_buffer()
            landed = self.downloads.send(self._pairs(entry, gradient, buffer), name, made)
            self.updates.submit(Update(entry, landed, ring, into_row=True))
        else:
            with self.store.lock:
                if entry.row is None and self.stager is not None:
                    self.stager.pump()
                self.store.wait_main(lambda: entry.row is not None)
                entry.queued += 1  # from here on the row stays, whoever asks for one
                row = self.store.host(entry, Part.GRADS)
                if entry.disk_row is not None:
                    entry.have |= Part.GRADS
                    entry.dirty |= Part.GRADS
            landed = self.downloads.send(self._pairs(entry, gradient, row), name, made)
            self.updates.submit(Update(entry, landed))  # lets the row go once it has landed
            with self.store.lock:
                entry.queued -= 1
            self._kept.add(entry.number)

    def _pairs(
        self, entry: Entry, gradient: tuple[Tensor, Tensor, Tensor], row: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        flat = self.layout.weights(row)
        dw_in, dw_out, square = gradient
        cut = self.shape.in_numel
        return [
            (flat[:cut], dw_in.reshape(-1)),
            (flat[cut:], dw_out.reshape(-1)),
            (self.squares[entry.number], square),
        ]

    def _take_buffer(self) -> tuple[int, Tensor]:
        assert self.ring is not None
        ring = self.ring.take()
        return ring, self.ring.buffers[ring]

    def _keep_gradients(self) -> None:
        """Takes the memory for gradients that must wait: of clipping or of accumulation."""
        if Part.GRADS in self.store.slabs:
            return
        rows = self.store.home_rows + self.store.cache_rows
        need = self.bytes_by_tier()["host"] + rows * self.layout.weight_bytes + PROCESS
        if need > self.placement.host_memory:
            raise BudgetError(
                f"gradients that wait for clipping or accumulation need --host-memory "
                f"{format_size(need)} in all, it is {format_size(self.placement.host_memory)}; "
                "raise it, give a --disk folder, or train without them (max_grad_norm=None)"
            )
        self.store.take(Part.GRADS)

    def _outdate(self, entry: Entry) -> None:
        """The gradient is complete: the weights, here and on the device, are of the past."""
        with self.store.lock:
            entry.stale = True
            entry.version += 1

    def _complete(self, layer: int, counts: Sequence[int]) -> None:
        assert self.rule is not None
        hyper = self.rule.hyper(layer)
        for index in range(self.n_experts):
            entry = self._entry(layer, index)
            if self.rule.keep_gradients:
                self._outdate(entry)
            elif entry.number in self._kept:
                self._outdate(entry)
                self.updates.submit(Update(entry, PASSED, from_row=True, hyper=hyper))
            elif not counts[index]:
                self._outdate(entry)
                self.updates.submit(Update(entry, PASSED, hyper=hyper))

    def switch(self, settings: Settings) -> None:
        """Turns techniques on or off between steps, to see what each is worth."""
        self.flush()
        self.settings = settings
        self.loader.overlap = settings.overlap_uploads

    # -- the end of a step ----------------------------------------------------------------

    def attach(self, rule: UpdateRule, state_dtype: torch.dtype) -> None:
        if Part.STATES not in self.store.slabs:
            self.store.set_state_dtype(state_dtype)
            self.layout = self.store.layout
            self.store.take(Part.STATES)
        self.rule = rule
        if rule.keep_gradients:
            self._keep_gradients()
        if self.ring is None:
            # where gradients are kept, buffers only serve to add up micro-batches
            buffers = min(8, self.placement.ring) if rule.keep_gradients else self.placement.ring
            pinned = self.device.type == "cuda"
            slab = HostSlab(
                "gradient buffers", buffers, self.layout.weight_bytes, pinned, self.progress
            )
            self.ring = GradientRing(self.store, slab)
            self.updates.ring = self.ring

    def gradient_squares(self) -> float:
        self._settle()
        kept = sorted(self._kept)
        return float(self.squares[kept].double().sum()) if kept else 0.0

    def _settle(self) -> None:
        """Waits until all gradients of this step are in host memory."""
        self.downloads.wait()
        if self.rule is not None and self.rule.keep_gradients:
            self.updates.wait_idle()

    def _apply(self, layers: Sequence[int]) -> None:
        assert self.rule is not None
        self._settle()
        if self.rule.keep_gradients:
            for layer in layers:
                hyper = self.rule.hyper(layer)
                for index in range(self.n_experts):
                    entry = self._entry(layer, index)
                    from_row = entry.number in self._kept
                    self.updates.submit(Update(entry, PASSED, from_row=from_row, hyper=hyper))
        self._kept.clear()
        places = len(self._pin_slots) if self.settings.pin_share else 0
        chosen = choose_pinned(self._step_tokens, places)
        with self.store.lock:
            self._pinned = place_pinned(chosen, self._pinned, self._pin_slots)
        self._step_tokens = [[0] * self.n_experts for _ in range(self.n_layers)]
        if not self.settings.overlap_updates:
            self.updates.wait_idle()
        self._raise_not_finite()

    def _raise_not_finite(self) -> None:
        with self.store.lock:
            bad, self.updates.not_finite = self.updates.not_finite, []
        if bad:
            raise NonFiniteError(
                f"the gradient of {len(bad)} experts (first: layer {bad[0].layer}, expert "
                f"{bad[0].index}) is NaN or infinite; they were not updated. Lower the learning "
                "rate or set max_grad_norm, and go on from the last checkpoint"
            )

    def discard(self) -> None:
        self._settle()
        with self.store.lock:
            for entry in self.store.entries:
                if not entry.queued:
                    entry.stale = False
                if entry.number in self._kept and entry.disk_row is not None:
                    entry.have &= ~Part.GRADS
                    entry.dirty &= ~Part.GRADS
            self.store.wake_loader.notify()
        self._kept.clear()
        self._forget_step()

    # -- records --------------------------------------------------------------------------

    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        row = self.store.read_part(self.store.entry(expert), Part.WEIGHTS)
        out.copy_(self.layout.weights(row))

    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        entry = self.store.entry(expert)
        self.store.write_part(entry, Part.WEIGHTS, lambda row: fill(self.layout.weights(row)))

    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        row = self.store.read_part(self.store.entry(expert), Part.STATES)
        out.copy_(self.layout.state(row, name))

    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        def fill(row: Tensor) -> None:
            self.layout.state(row, name).copy_(value)

        self.store.write_part(self.store.entry(expert), Part.STATES, fill)

    # -- life -----------------------------------------------------------------------------

    def flush(self) -> None:
        self.downloads.wait()
        self.updates.wait_idle()
        if self.stager is not None:
            self.stager.wait_idle()
        self.store.raise_error()

    def check_conserved(self) -> None:
        self.flush()
        self.store.check_conserved()
        if self.ring is not None:
            self.ring.check_conserved()
        held = [chunk for chunk in self._banks if chunk is not None]
        assert len(held) == len(set(held)), "a chunk is in two banks"
        assert len(set(self._pinned.values())) == len(self._pinned), "a slot is pinned twice"

    def bytes_by_tier(self) -> dict[str, int]:
        ring = 0 if self.ring is None else self.ring.buffers.nbytes
        return {
            "gpu": self.loader.slab.nbytes,
            "host": self.store.host_bytes() + ring,
            "disk": self.store.disk_bytes(),
        }

    def describe(self) -> str:
        sizes = {tier: format_size(size) for tier, size in self.bytes_by_tier().items()}
        place = self.placement
        line = (
            f"mode {place.mode}: {self.n_layers * self.n_experts} experts of "
            f"{format_size(self.layout.weight_bytes)}; {place.slots} slots on {self.device} "
            f"({sizes['gpu']}, {place.pinned} pinned), {self.store.home_rows} in host memory "
            f"({sizes['host']})"
        )
        if self.store.disk_rows:
            line += (
                f", {self.store.disk_rows} on disk ({sizes['disk']}) through "
                f"{self.store.cache_rows} host rows"
            )
        return line

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.loader.close()
        self.updates.close()
        if self.stager is not None:
            self.stager.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing may copy from memory that goes away
        if self.ring is not None:
            self.ring.buffers.close()
        self.store.close()

    # -- traces ---------------------------------------------------------------------------

    def _trace_start(self) -> TraceStart:
        if not self.recorder.enabled:
            return None
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _trace_end(self, begun: TraceStart, name: str) -> None:
        if isinstance(begun, int):
            self.recorder.host_span("gpu compute", name, begun)
        elif begun is not None:
            end = self._trace_start()
            if isinstance(end, torch.cuda.Event):
                self.recorder.device_span("gpu compute", name, begun, end)

    def _trace_wave(self) -> None:
        name, begun = self._wave_since
        self._trace_end(begun, name)
        self._wave_since = ("", None)

    def _trace_dense(self) -> None:
        """What ran on the compute stream since the last layer's experts: attention, router."""
        self._trace_end(self._dense_since, "dense")
        self._dense_since = None
