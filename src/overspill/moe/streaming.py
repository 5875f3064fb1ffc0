"""Experts streamed from host memory and disk through slots of the compute device."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.core.experts import ExpertId, Phase
from overspill.core.sizes import format_size
from overspill.hardware.machine import cpu_threads
from overspill.hardware.profile import ExpertCosts
from overspill.moe.compute_trace import ComputeTrace
from overspill.moe.course import Course
from overspill.moe.engine import Engine, UpdateRule
from overspill.moe.gradients import Gradients
from overspill.moe.host_buffers import room_for_rows
from overspill.moe.host_experts import HostExperts
from overspill.moe.passes import HostWork, LayerPass, Wave, sum_of_squares
from overspill.moe.residency import Residency
from overspill.moe.routes import Routes
from overspill.moe.settings import Settings
from overspill.moe.sharing import Present, Sharing
from overspill.moe.waves import Waves
from overspill.optim.kernel import AdamHyper
from overspill.optim.updates import Updates
from overspill.plan.budget import Placement
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress, device_slab
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import Lane, compute_mark
from overspill.transfer.ported import new_loader
from overspill.transfer.requests import run_all
from overspill.transfer.stager import Stager

_log = logging.getLogger("overspill")
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
        costs: ExpertCosts | None = None,
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
        inject = settings.inject
        upload = Lane("upload", device, recorder, inject)
        self.loader = new_loader(self.store, slab, upload, placement.slots)
        self.loader.overlap = settings.overlap_uploads
        squares = torch.zeros(n_layers * n_experts, pin_memory=on_gpu)
        threads = cpu_threads(settings.threads)
        self.updates = Updates(self.store, squares, threads, recorder, inject)
        self.stager: Stager | None = None
        if self.store.disk_rows:
            self.stager = Stager(self.store, self._needs, _SSD_WORKERS, recorder, inject)
            self.updates.stager = self.stager
            self.loader.row_read = self.stager.pump
        download = Lane("download", device, recorder, inject)
        self.gradients = Gradients(self.store, placement, download, self.updates, self.stager)
        room = room_for_rows(layout.shape.d_model, layout.dtype)
        self.sharing = Sharing(self.course, costs, room, self._present)
        self.sharing.on = settings.cpu_experts and costs is not None
        planned = self.course, self.residency, self.sharing
        moved = self.loader, self.stager
        self._waves = Waves(self.store, *planned, *moved, self.trace, device)
        self._threads = threads
        self._host: HostExperts | None = None
        routed = self.store, self.course, self.sharing
        self.routes = Routes(*routed, lambda: self.gates, settings, device)

    # -- who computes what ----------------------------------------------------------------

    def needs_counts(self, rows: int) -> bool:
        return True  # which experts are uploaded depends on them

    def route(
        self, layer_pass: LayerPass, x_TD: Tensor, expert_ids_TK: Tensor, phase: Phase
    ) -> None:
        self._begin(layer_pass)
        self.routes.enter(layer_pass, x_TD, expert_ids_TK, phase)
        self.trace.enter_experts()

    def reroute(self, layer_pass: LayerPass) -> None:
        self._begin(layer_pass)
        self.routes.enter_again(layer_pass)
        self.trace.enter_experts()

    def _begin(self, layer_pass: LayerPass) -> None:
        self._check_pass(layer_pass.layer)
        self._await_host()  # a pass that was given up may have left it at work
        rule = self.rule if layer_pass.training and layer_pass.trained else None
        with self.store.lock:
            self.sharing.trained = rule is not None and rule.hyper(layer_pass.layer) is not None

    def _present(self, layer: int) -> Present:
        """Experts of a layer that are on the device or on their way."""
        loader, present = self.loader, Present(set(), set())
        for index, slot in self.residency.slots(layer).items():
            if loader.fresh(self.store.at(layer, index), slot):
                (present.resident if loader.slots[slot].used else present.uploaded).add(index)
        return present

    def host_forward(self, layer_pass: LayerPass, x_TD: Tensor) -> HostWork | None:
        return self._hosts().forward(layer_pass, x_TD) if layer_pass.on_host else None

    def host_backward(
        self,
        layer_pass: LayerPass,
        x_TD: Tensor,
        dy_TD: Tensor,
        weights_TK: Tensor,
        need_dw: bool,
    ) -> HostWork | None:
        if not layer_pass.on_host:
            return None
        layer = layer_pass.layer
        hyper = self._hyper_now(layer) if need_dw and self.is_final(layer) else None
        if need_dw and hyper is None:
            self.gradients.take_rows()  # here, where the caller hears that there is no room
        return self._hosts().backward(layer_pass, x_TD, dy_TD, weights_TK, need_dw, hyper)

    def _hosts(self) -> HostExperts:
        """Made when the CPU gets its first experts: many trainings never give it any."""
        if self._host is None:
            with torch.inference_mode(False):  # the buffers outlive it
                self._host = HostExperts(
                    self.store,
                    self.course,
                    self.gradients,
                    self.stager,
                    self.device,
                    self._threads,
                    self.recorder,
                    self.settings.inject,
                    self.sharing,
                )
        return self._host

    def waves(self, layer_pass: LayerPass, phase: Phase) -> Iterator[Wave]:
        return self._waves.of(layer_pass, phase, self.settings, self.placement.max_rows)

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
                entry = self.store.at(layer, wave.first + place)
                gradient = [part[place] for part in dw]
                self.gradients.send(entry, gradient, squares[place], made, hyper)
                with self.store.lock:
                    self.course.leave([entry.id.index])

    def _complete(self, layer: int, counts: Sequence[int]) -> None:
        hyper = self._hyper_now(layer)
        for index, tokens in enumerate(counts):
            self.gradients.complete(self.store.at(layer, index), tokens, hyper)

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
        wanted = settings.may_share and not self.settings.may_share
        self.settings = self.routes.settings = settings
        self.loader.overlap = settings.overlap_uploads
        if wanted and self.sharing.costs is None:
            _log.warning("cpu_experts: nothing was measured; set it when the model is offloaded")
        self.sharing.on = settings.cpu_experts and self.sharing.costs is not None

    def gradient_squares(self) -> float:
        self._check_open()
        self._await_host()
        self.gradients.settle(self._keeps_gradients())
        return self.gradients.sum_of_squares()

    def _apply(self, layers: Sequence[int]) -> None:
        assert self.rule is not None
        # what is being added up shows only when it is done whether it is finite
        self.gradients.settle(self.rule.keep_gradients or self.gradients.holds_any())
        for layer in layers if self.rule.keep_gradients else ():
            entries = [self.store.at(layer, index) for index in range(self.n_experts)]
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
        self._await_host()
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
        self.loader.settle()

    def _at_rest(self) -> bool:
        stager_idle = self.stager is None or self.stager.idle()
        host_idle = self._host is None or self._host.idle()
        return self.updates.idle() and stager_idle and host_idle and self.loader.idle()

    def _await_host(self) -> None:
        if self._host is not None and not self._host.idle():
            with self.store.lock:
                self.store.wait_main(self._host.idle)

    def check_conserved(self) -> None:
        self.flush()
        self.store.check_conserved()
        self.gradients.check_conserved()
        self.residency.check_conserved()

    def bytes_by_tier(self) -> dict[str, int]:
        return {
            "gpu": self.loader.slab.nbytes,
            "host": self.gradients.host_bytes() + (0 if self._host is None else self._host.nbytes),
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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing may copy from memory that goes away
        if self._host is not None:
            self._host.close()
        self.updates.close()
        if self.stager is not None:
            self.stager.close()
        self.gradients.close()
        self.store.close()
        self._waves.close()
        self._lift_budget()


def _zero(row: Tensor) -> None:
    row.zero_()
