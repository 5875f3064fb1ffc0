"""Experts streamed from host memory and disk through slots of the compute device."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.core.experts import ExpertId, Phase
from overspill.core.sizes import format_size
from overspill.hardware.machine import usable_cores
from overspill.moe.compute_trace import ComputeTrace
from overspill.moe.course import Course
from overspill.moe.engine import Engine, Settings, UpdateRule
from overspill.moe.gradients import Gradients
from overspill.moe.passes import LayerPass, Wave, sum_of_squares
from overspill.moe.residency import Residency
from overspill.optim.kernel import AdamHyper
from overspill.optim.updates import Updates
from overspill.plan.budget import Placement
from overspill.plan.waves import Candidate, next_wave
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress, device_slab
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import Lane, Mark, compute_mark, compute_waits
from overspill.transfer.loader import Loader
from overspill.transfer.requests import run_all
from overspill.transfer.stager import Stager

_SSD_WORKERS = 4  # for reads, and as many for writes


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
        on_gpu = device.type == "cuda"
        # first what may not fit: nothing else has been taken yet
        slab = device_slab(placement.slots, layout.weight_bytes, device)
        rows = placement.home_rows, placement.cache_rows
        self.store = ExpertStore(n_layers, n_experts, layout, *rows, on_gpu, disk, progress)
        self.course = Course(n_layers, n_experts)
        self.residency = Residency(n_experts, placement)
        self.trace = ComputeTrace(recorder, device)
        self._slot_weights = layout.weights(slab)
        inject = settings.inject
        upload = Lane("upload", device, recorder, inject)
        self.loader = Loader(self.store, slab, upload, placement.slots)
        self.loader.overlap = settings.overlap_uploads
        squares = torch.zeros(n_layers * n_experts, pin_memory=on_gpu)
        threads = settings.threads or max(1, usable_cores() - 4, usable_cores() * 3 // 4)
        self.updates = Updates(self.store, squares, threads, recorder, inject)
        self.stager: Stager | None = None
        if self.store.disk_rows:
            self.stager = Stager(self.store, self._needs, _SSD_WORKERS, recorder, inject)
            self.updates.stager = self.stager
            self.loader.row_read = self.stager.pump
        download = Lane("download", device, recorder, inject)
        self.gradients = Gradients(self.store, placement, download, self.updates, self.stager)

    # -- waves ----------------------------------------------------------------------------

    def needs_counts(self, rows: int) -> bool:
        return True  # which experts are uploaded depends on them

    def waves(self, layer_pass: LayerPass, phase: Phase) -> Iterator[Wave]:
        layer, counts = layer_pass.layer, layer_pass.counts
        permutation = layer_pass.permutation
        assert permutation is not None
        self._check_pass(layer)
        self.trace.enter_experts()
        with self.store.lock:
            self.course.enter(layer, phase, counts, layer_pass.training)
        starts = [0, *itertools.accumulate(counts)]
        for part in range(self.residency.n_parts):
            pending = [index for index in self.residency.experts(part) if counts[index]]
            if pending:
                self._focus(part)
            while pending:
                run, slots, marks = self._await_wave(layer, pending, counts)
                for mark in marks:
                    compute_waits(self.device, mark)  # the compute stream itself, not the host
                first, stop = run[0], run[-1] + 1
                self.trace.begin_wave(f"{phase.value} {layer}.{first}-{stop - 1}")
                yield Wave(
                    first,
                    stop,
                    starts[first],
                    starts[stop],
                    self._slot_weights[slots[0] : slots[-1] + 1],
                    permutation.ends_E[first:stop] - starts[first],
                    counts[first:stop],
                )
                self.trace.end_wave()
                used = compute_mark(self.device)  # a slot may be filled anew once this has passed
                with self.store.lock:
                    for slot in slots:
                        self.loader.slots[slot].free = used
                    self.course.leave(run)
                pending = pending[len(run) :]
        self.trace.leave_experts()

    def _focus(self, part: int) -> None:
        """Tells the loader and the stager that this part is needed now, and what follows it."""
        with self.store.lock:
            ahead = self.settings.overlap_uploads
            needed = self.course.chunks(part, self.residency.n_parts, ahead)
            targets = self.residency.follow(needed, self.course.expects)
            self.loader.set_targets([(self.store.entry(id), slot) for id, slot in targets])
            if self.stager is not None:
                self.stager.pump()

    def _await_wave(
        self, layer: int, pending: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[int], list[int], list[Mark]]:
        """Blocks until the first of `pending` is on its way to its slot, then takes as many as may
        compute with it: (indices, slots, ends of their uploads)."""
        loader = self.loader
        with self.store.lock:
            entries = {index: self._entry(layer, index) for index in pending}
            first = entries[pending[0]]
            if self.stager is not None:
                self.stager.pump()  # rows of experts that were passed are free for those to come
            slot_of = {index: self.residency.slot(entry.id) for index, entry in entries.items()}
            self.store.wait_main(lambda: loader.fresh(first, slot_of[pending[0]]))
            candidates = []
            for index, slot in slot_of.items():
                here = loader.fresh(entries[index], slot)
                arrived = here and loader.slots[slot].ready.done()
                candidates.append(Candidate(index, slot, counts[index], here, arrived))
            number = next_wave(candidates, self.placement.max_rows, self.settings.waves)
            run = list(pending[:number])
            marks = [loader.slots[slot_of[index]].ready for index in run]
            slots = list(range(slot_of[run[0]], slot_of[run[-1]] + 1))
            return run, slots, marks

    def _entry(self, layer: int, index: int) -> Entry:
        return self.store.entry(ExpertId(layer, index))

    def _needs(self) -> Iterator[tuple[Entry, Part]]:
        """What the stager should have in host rows: pending updates, then the known order."""
        yield from self.updates.waiting()
        immediate = self.rule is not None and not self._keeps_gradients() and not self.accumulating
        for expert, states in self.course.experts(with_states=immediate):
            parts = Part.WEIGHTS | Part.STATES if states else Part.WEIGHTS
            yield self.store.entry(expert), parts

    # -- gradients ------------------------------------------------------------------------

    def deliver(self, layer_pass: LayerPass, wave: Wave, dw: Sequence[Tensor]) -> None:
        self.trace.end_wave()  # before the host may have to wait for a buffer
        layer = layer_pass.layer
        dw = [part.to(self.dtype) for part in dw]
        squares = sum_of_squares(dw)
        made = compute_mark(self.device)  # the gradients are complete on the compute stream here
        hyper = self._hyper_now(layer) if self.is_final(layer) else None
        assert wave.counts is not None
        for place, count in enumerate(wave.counts):
            if count:
                entry = self._entry(layer, wave.first + place)
                gradient = [part[place] for part in dw]
                self.gradients.send(entry, gradient, squares[place], made, hyper)
                with self.store.lock:
                    self.course.leave([entry.id.index])

    def _complete(self, layer: int, counts: Sequence[int]) -> None:
        hyper = self._hyper_now(layer)
        for index, tokens in enumerate(counts):
            self.gradients.complete(self._entry(layer, index), tokens, hyper)

    def _keeps_gradients(self) -> bool:
        return self.rule is not None and self.rule.keep_gradients

    def _hyper_now(self, layer: int) -> AdamHyper | None:
        """How to update the layer's experts during backward; None if that waits for step()."""
        assert self.rule is not None
        return None if self.rule.keep_gradients else self.rule.hyper(layer)

    # -- the end of a step ----------------------------------------------------------------

    def attach(self, rule: UpdateRule, state_dtype: torch.dtype) -> None:
        again = self._attach(rule)
        if Part.STATES not in self.store.slabs:
            self.store.set_state_dtype(state_dtype)
            self.layout = self.store.layout
            self.store.take(Part.STATES)
        elif again:
            self.flush()
            for entry in self.store.entries:
                self.store.write_part(entry, Part.STATES, _zero)
        self.gradients.take_memory(rule.keep_gradients, self.progress)

    def switch(self, settings: Settings) -> None:
        """Turns techniques on or off between steps, to see what each is worth."""
        self.flush()
        self.settings = settings
        self.loader.overlap = settings.overlap_uploads

    def gradient_squares(self) -> float:
        self._check_open()
        self.gradients.settle(self._keeps_gradients())
        return self.gradients.sum_of_squares()

    def _apply(self, layers: Sequence[int]) -> None:
        assert self.rule is not None
        # what is being added up shows only when it is done whether it is finite
        self.gradients.settle(self.rule.keep_gradients or self.gradients.holds_any())
        for layer in layers if self.rule.keep_gradients else ():
            entries = [self._entry(layer, index) for index in range(self.n_experts)]
            self.gradients.update(entries, self.rule.hyper(layer))
        self.gradients.end_step()
        with self.store.lock:
            self.residency.pin(self.course.step_tokens, self.settings.pin_share > 0)
            self.course.end_step()
        if not self.settings.overlap_updates:
            self.updates.wait_idle()
        self._check_finite()

    def _check_finite(self) -> None:
        """The updates have refused gradients that are not finite; this tells of them."""
        squares = self.gradients.squares
        if torch.isfinite(squares).all():
            return
        self.updates.wait_idle()  # they look at the same numbers
        bad = (~torch.isfinite(squares)).nonzero().flatten().tolist()
        squares[bad] = 0.0
        first = self.store.entries[bad[0]].id
        self._forget_step()
        raise NonFiniteError(
            f"the gradient of {len(bad)} experts (first: layer {first.layer}, expert "
            f"{first.index}) is NaN or infinite; they were not updated. Lower the learning "
            "rate or set max_grad_norm, and go on from the last checkpoint"
        )

    def discard(self) -> None:
        self.gradients.settle(kept=True)  # what is still being added up must not come after
        self.gradients.discard()
        self._forget_step()

    # -- records --------------------------------------------------------------------------

    def fill(
        self, fill: Callable[[ExpertId, Tensor], None], workers: int = 1, on_host: bool = False
    ) -> None:
        def fill_one(entry: Entry) -> None:
            self.store.set_part(
                entry, Part.WEIGHTS, lambda row: fill(entry.id, self.layout.weights(row))
            )

        run_all(fill_one, self.store.entries, workers)
        self.store.settle()

    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        self._check_open()
        row = self.store.read_part(self.store.entry(expert), Part.WEIGHTS)
        out.copy_(self.layout.weights(row))

    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        self._check_open()
        entry = self.store.entry(expert)
        self.store.write_part(entry, Part.WEIGHTS, lambda row: fill(self.layout.weights(row)))
        if self.dtype == torch.bfloat16 and Part.STATES in self.store.slabs:
            # the master is the new weight, without low bits of the old one
            self.store.write_part(
                entry, Part.STATES, lambda row: _zero(self.layout.state(row, "low"))
            )

    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        self._check_open()
        row = self.store.read_part(self.store.entry(expert), Part.STATES)
        out.copy_(self.layout.state(row, name))

    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        self._check_open()

        def fill(row: Tensor) -> None:
            self.layout.state(row, name).copy_(value)

        self.store.write_part(self.store.entry(expert), Part.STATES, fill)

    # -- life -----------------------------------------------------------------------------

    def flush(self) -> None:
        self._check_open()
        self.gradients.downloads.wait()
        with self.store.lock:
            # all at once: what one of them ends may let another begin
            self.store.wait_main(self._at_rest)

    def _at_rest(self) -> bool:
        stager_idle = self.stager is None or self.stager.idle()
        return self.updates.idle() and stager_idle and self.loader.idle()

    def check_conserved(self) -> None:
        self.flush()
        self.store.check_conserved()
        self.gradients.check_conserved()
        self.residency.check_conserved()

    def bytes_by_tier(self) -> dict[str, int]:
        return {
            "gpu": self.loader.slab.nbytes,
            "host": self.gradients.host_bytes(),
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
        self.gradients.close()
        self.store.close()
        self._slot_weights = self._slot_weights.new_empty(0, self.shape.numel)
        self._lift_budget()


def _zero(row: Tensor) -> None:
    row.zero_()
