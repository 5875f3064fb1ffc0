"""Experts streamed from host memory and disk through slots of the compute device."""

import logging
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from overspill.compute.cpu_kernel import max_kernel_rows, why_unsupported
from overspill.core.experts import Phase
from overspill.hardware.profile import ExpertCosts
from overspill.moe.compute_trace import ComputeTrace
from overspill.moe.dispatch import Dispatcher
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.settings import Settings
from overspill.moe.streaming.cpu_buffers import max_cpu_rows
from overspill.moe.streaming.cpu_experts import CpuExperts
from overspill.moe.streaming.cpu_split import CpuSplit, OnDevice, Optimizer
from overspill.moe.streaming.slot_plan import SlotPlan
from overspill.moe.streaming.step_cursor import StepCursor
from overspill.moe.streaming.waves import WaveLimits, Waves
from overspill.plan.budget import Placement
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.new_uploader import new_uploader
from overspill.transfer.streams import CopyStream
from overspill.transfer.uploader import Uploader

_log = logging.getLogger("overspill")


class StreamingCompute:
    """Experts that are uploaded ahead of compute, along the known order of the step. With `costs`
    the CPU may compute some of them beside the device."""

    def __init__(
        self,
        store: ExpertStore,
        dispatcher: Dispatcher,
        slab: Tensor,
        device: torch.device,
        placement: Placement,
        settings: Settings,
        recorder: Recorder,
        threads: int,
        costs: ExpertCosts | None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """`slab` is the memory of the GPU slots. `optimizer` is that of the experts on the CPU."""
        self._store = store
        self._sync = store.sync
        self._places = store.places
        self._dispatcher = dispatcher
        self._device = device
        self._settings = settings
        self._recorder = recorder
        self._threads = threads
        n_experts = store.places.computed[0].n_local
        self.cursor = StepCursor(n_experts, store.places.residents)
        self.plan = SlotPlan(n_experts, store.places.residents, placement.slots)
        self.trace = ComputeTrace(recorder, device)
        self._slab = slab
        self._upload_stream = CopyStream("upload", device, recorder, settings.inject)
        self._optimizer = optimizer
        self.split = self._new_split(costs)
        self._cpu: CpuExperts | None = None
        self._hints: dict[int, Tensor] = {}  # rows of each expert, by layer
        self._predicted: dict[int, tuple[Tensor, float]] = {}  # and for how many tokens one stands
        self._unsupported: set[int] = set()  # layers that the CPU kernel cannot compute
        store.sync.device_busy = self._device_busy
        # last: a failure after it would leave a thread
        self.uploader, self._waves = self._start_uploads(settings.uploader)

    def _device_busy(self) -> bool:
        upload = self._upload_stream.stream
        if upload is None:
            return False
        return not (torch.cuda.current_stream(self._device).query() and upload.query())

    def _start_uploads(self, kind: str) -> tuple[Uploader, Waves]:
        store, slab, stream = self._store, self._slab, self._upload_stream
        uploader = new_uploader(store, slab, stream, len(slab), kind)
        try:
            uploader.set_overlap(self._settings.overlap_uploads)
            planned = self.cursor, self.plan, self.split
            return uploader, Waves(store, *planned, uploader, self.trace, self._device)
        except BaseException:
            uploader.close()
            raise

    def _new_split(self, costs: ExpertCosts | None) -> CpuSplit | None:
        policy = self._settings.cpu_policy
        if costs is None and policy is None:
            return None
        layout = self._store.memory.layout
        reason = why_unsupported(layout.dtype, layout.shape, None)
        if layout.format is not None:
            reason = "the kernel does not read packed experts"
        if any(layout.ranks):
            reason = "the experts have an adapter beside their weights"
        if self._places.disk_slots:
            reason = "experts on disk change their host slots"
        if reason is not None:
            _log.warning("cpu_experts is off: %s", reason)
            return None
        split = CpuSplit(
            self.cursor,
            costs,
            max_cpu_rows(layout.shape.d_model, layout.dtype),
            lambda phase: max_kernel_rows(layout.dtype, phase is Phase.BACKWARD),
            self._on_device,
            lambda layer, position: self._places.at(layer, position).readable,
            policy,
            self._optimizer,
        )
        split.set_enabled(self._settings.cpu_experts)
        return split

    def _on_device(self, layer: int) -> OnDevice:
        """Experts of a layer that are on the device or on their way."""
        passes = self.cursor.stage_passes(layer, self.plan.fits)
        found = OnDevice(set(range(self._places.residents[layer])), set(), passes)
        for position, slot in self.plan.slots(layer).items():
            if self.uploader.is_issued(self._places.at(layer, position), slot):
                used = self.uploader.was_used(slot)
                (found.resident if used else found.uploaded).add(position)
        return found

    def hint(self, layer: int, expert_ids_TK: Tensor) -> None:
        """Note the experts of the next forward through a layer. Does not wait for the device: their
        counts are read when the next pass begins, which has waited for its own."""
        self._hints[layer] = self._dispatcher.start_count(layer, expert_ids_TK)

    def wants_prediction(self, layer: int) -> bool:
        """Whether a prediction of the next forward through a layer is worth its time."""
        with self._sync.lock:
            return self.cursor.counts_ahead.wants_prediction(layer)

    def predict(self, layer: int, expert_ids_NK: Tensor, tokens_each: float) -> None:
        """Note the experts that tokens will likely have, as `hint` does; each of the N tokens
        stands for `tokens_each`."""
        counts_E = self._dispatcher.start_count(layer, expert_ids_NK)
        self._predicted[layer] = counts_E, tokens_each

    def follow_hints(self, first: bool) -> None:
        """Use the hints for a forward through a layer, the `first` one or a later one."""
        hints, self._hints = self._hints, {}
        predicted, self._predicted = self._predicted, {}
        ahead = self.cursor.counts_ahead
        with self._sync.lock:
            if first:  # the pass of earlier hints is over: it may have failed
                ahead.forget_hints()
            for layer, counts_E in hints.items():
                ahead.hint(layer, counts_E.tolist())
            for layer, (counts_E, tokens_each) in predicted.items():
                ahead.predict(layer, [tokens_each * count for count in counts_E.tolist()])

    def allow_split(self, layer_pass: LayerPass, sortable: bool) -> bool:
        """Whether the CPU may get experts of this pass: where weight gradients are made only with
        `cpu_training`, not with dropout or adapters, which its kernel does not have, and only if
        the rows can be sorted by the split. With kept activations they cannot: these lie in the
        order of their rows."""
        if self.split is None:
            return False
        trains = layer_pass.training and layer_pass.trained and not self._settings.cpu_training
        plain = layer_pass.dropout is None and layer_pass.adapters is None
        allowed = sortable and plain and not trains and self._is_supported(layer_pass)
        with self._sync.lock:
            return self.split.enter(layer_pass.layer, allowed, layer_pass.trained)

    def _is_supported(self, layer_pass: LayerPass) -> bool:
        layout = self._store.memory.layout
        reason = why_unsupported(layout.dtype, layout.shape, layer_pass.activation)
        if reason is not None and layer_pass.layer not in self._unsupported:
            self._unsupported.add(layer_pass.layer)
            _log.warning("cpu_experts is off for layer %d: %s", layer_pass.layer, reason)
        return reason is None

    def expects_split(self, layer: int) -> bool:
        """Whether the CPU will likely get experts of the next pass through a layer."""
        assert self.split is not None
        with self._sync.lock:
            return self.split.likely(layer)

    def enter(self, layer_pass: LayerPass, phase: Phase, need_dw: bool = False) -> None:
        """Begin a pass whose counts are known. Decides which experts the CPU computes, and sorts
        the rows by that."""
        rows = layer_pass.rows
        assert rows.counts is not None
        with self._sync.lock:
            self.cursor.enter(layer_pass.layer, phase, rows.counts, layer_pass.training)
            if self.split is not None:
                layer_pass.on_cpu = self.split.decide(
                    layer_pass.layer, rows.counts, phase, layer_pass.on_cpu, need_dw
                )
        if self.split is not None and rows.expert_ids_TK is not None:
            self._dispatcher.sort(rows, layer_pass.on_cpu)
        self.trace.enter_experts()

    def waves(
        self,
        resident: Iterator[Wave],
        layer_pass: LayerPass,
        phase: Phase,
        max_rows: int,
        positions: Collection[int] | None,
    ) -> Iterator[Wave]:
        """Yield the waves of `resident` experts, then those of streamed ones as they arrive."""
        settings = self._settings
        self._waves.follow_stream()
        for wave in resident:
            name = f"{phase.value} {layer_pass.layer}.{wave.first}-{wave.stop - 1}"
            self.trace.begin_wave(name)
            try:
                yield wave
            finally:
                self.trace.end_wave()
        limits = WaveLimits(settings.waves, settings.overlap_uploads, max_rows)
        yield from self._waves.of(layer_pass, phase, limits, positions)

    @property
    def cpu(self) -> CpuExperts:
        """The experts that the CPU computes; made when it gets its first ones."""
        if self._cpu is None:
            assert self.split is not None
            with torch.inference_mode(False):  # the buffers outlive it
                self._cpu = CpuExperts(
                    self._store,
                    self.cursor,
                    self._dispatcher,
                    self.split,
                    self._device,
                    self._threads,
                    self._recorder,
                    self._settings.inject,
                )
        return self._cpu

    @property
    def cpu_bytes(self) -> int:
        """Host memory of the buffers of CPU experts."""
        return 0 if self._cpu is None else self._cpu.nbytes

    def wait_readers(self) -> None:
        """Block until no upload and no CPU expert reads weights in host memory."""
        self.uploader.wait_idle()
        self._upload_stream.synchronize()
        if self._cpu is not None:
            self._cpu.wait_idle()

    def wait_for_uploads(self, stream: torch.cuda.Stream | None) -> None:
        """Makes a stream wait for all uploads that have begun; without one, the caller."""
        if stream is None or self._upload_stream.stream is None:
            self._upload_stream.synchronize()
        else:
            stream.wait_stream(self._upload_stream.stream)

    def end_cpu_job(self) -> None:
        """Block until the CPU computes nothing, whatever has failed."""
        if self._cpu is not None:
            self._cpu.end_job()

    def set_settings(self, settings: Settings) -> None:
        """While nothing is being computed or transferred."""
        if settings.uploader != self._settings.uploader:
            self._replace_uploader(settings.uploader)
        self._settings = settings
        self.uploader.set_overlap(settings.overlap_uploads)
        if self.split is not None:
            self.split.set_enabled(settings.cpu_experts)

    def restart_uploads(self) -> None:
        """Begin uploads anew after a failure: no slot has an expert, and no upload is running."""
        self._replace_uploader(self._settings.uploader)

    def _replace_uploader(self, kind: str) -> None:
        uploads = self._start_uploads(kind)  # if refused, the old one goes on
        self.uploader.close()
        self._upload_stream.synchronize()  # the new one does not know who reads the slots
        self.uploader, self._waves = uploads

    def close(self) -> None:
        self.uploader.close()
        self._upload_stream.synchronize()  # no copy may still read memory that is freed
        if self._cpu is not None:
            self._cpu.close()
        self._waves.close()
        self._slab = self._slab.new_empty(0)
