"""The engine of experts that are streamed from host memory and disk."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from overspill.core.errors import OrderError
from overspill.core.expert_map import ExpertMap
from overspill.core.lifetime import Lifetime
from overspill.core.sizes import format_size
from overspill.hardware.machine import cpu_threads
from overspill.hardware.profile import ExpertCosts
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.moe.streaming.compute import StreamingCompute
from overspill.moe.streaming.gradients import StreamingGradients
from overspill.moe.streaming.records import StreamingRecords
from overspill.moe.training_step import TrainingStep
from overspill.plan.budget import Placement
from overspill.tiers.entry import Entry, Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress, device_slab
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.stager import Stager
from overspill.transfer.streams import CopyStream

_SSD_WORKERS = 4  # for reads, and as many for writes
_log = logging.getLogger("overspill")


class StreamingEngine(Engine):
    """Uploads run ahead of compute, gradients leave as they are made, updates run while the device
    continues, and the next upload of an expert waits only for its own update."""

    def __init__(
        self,
        n_layers: int,
        experts: ExpertMap,
        layout: RecordLayout,
        device: torch.device,
        placement: Placement,
        settings: Settings,
        recorder: Recorder,
        disk: Path | None = None,
        progress: Progress | None = None,
        costs: ExpertCosts | None = None,
    ) -> None:
        with ExitStack() as undo:  # a failure leaves no thread and no file
            # first what may not fit: nothing else is allocated yet
            slab = device_slab(placement.slots, layout.weight_bytes, device)
            slots = placement.home_slots, placement.cache_slots
            pinned = device.type == "cuda"
            store = ExpertStore(n_layers, experts, layout, *slots, pinned, disk, progress)
            undo.callback(store.close)
            threads = cpu_threads(settings.threads)
            compute = StreamingCompute(
                store, slab, device, placement, settings, recorder, threads, costs
            )
            undo.callback(compute.close)
            records = StreamingRecords(store)
            self._store = store
            self._compute = compute
            self._sink: StreamingGradients | None = None
            training: TrainingStep | None = None
            if placement.training:
                download = CopyStream("download", device, recorder, settings.inject)
                self._sink = StreamingGradients(
                    store,
                    compute.cursor,
                    compute.plan,
                    placement,
                    settings,
                    download,
                    compute.trace,
                    threads,
                    device,
                    compute.wait_readers,
                    progress,
                )
                training = TrainingStep(n_layers, self._sink, records)
            super().__init__(compute, training, records, placement, settings, recorder)
            self._stager: Stager | None = None
            if store.disk_slots:
                self._stager = Stager(store, self._needs, _SSD_WORKERS, recorder, settings.inject)
            undo.pop_all()

    def _needs(self) -> Iterator[tuple[Entry, Part]]:
        """What should be in host slots: experts with a pending update, then the order of need."""
        if self._sink is not None:
            yield from self._sink.waiting()
        with_states = self._training is not None and self._training.updates_at_once
        for layer, position, states in self._compute.cursor.needed(with_states):
            parts = Part.WEIGHTS | Part.STATES if states else Part.WEIGHTS
            yield self._store.at(layer, position), parts

    def switch(self, settings: Settings) -> None:
        self._check_switch(settings)
        self.flush()
        if settings.cpu_experts and self._compute.split is None:
            _log.warning("cpu_experts: nothing was measured; set it when the model is offloaded")
        self._compute.set_settings(settings)  # first: it may refuse them
        self._settings = settings
        if self._sink is not None:
            self._sink.set_settings(settings)

    @property
    def lifetime(self) -> Lifetime:
        return self._store.lifetime

    def flush(self) -> None:
        with self.exclusive():
            self.check_open()
            self._store.wake_all()  # an interrupt may have come before a thread was woken
            if self._sink is not None:
                self._sink.wait()
            # all at once: what one of them ends may let another begin
            what = "pending transfers and updates (uploader, update thread, disk transfers)"
            self._store.wait(self._idle, what)
            self._compute.wait_idle()

    def _idle(self) -> bool:
        stager_idle = self._stager is None or self._stager.idle()
        sink_idle = self._sink is None or self._sink.idle()
        return sink_idle and stager_idle and self._compute.uploader.idle()

    def check_conserved(self) -> None:
        self.flush()
        self._store.check_conserved()
        self._compute.plan.check_conserved()
        if self._sink is not None:
            self._sink.check_conserved()

    def bytes_by_tier(self) -> dict[str, int]:
        host = self._store.host_bytes() if self._sink is None else self._sink.host_bytes()
        return {
            "gpu": self._compute.uploader.slab.nbytes,
            "host": host + self._compute.cpu_bytes,
            "disk": self._store.disk_bytes(),
        }

    def describe(self) -> str:
        sizes = {tier: format_size(size) for tier, size in self.bytes_by_tier().items()}
        placement, store = self.placement, self._store
        resident = f", {placement.resident} for resident experts" if placement.resident else ""
        line = (
            f"mode {placement.mode}: {len(store.entries)} experts of "
            f"{format_size(self.layout.weight_bytes)}; {placement.slots} slots on {self.device} "
            f"({sizes['gpu']}{resident}), {store.home_slots} in host memory ({sizes['host']})"
        )
        if store.disk_slots:
            line += (
                f", {store.disk_slots} on disk ({sizes['disk']}) through {store.cache_slots} "
                "host slots"
            )
        return line

    def _interrupt(self) -> None:
        self._store.fail(
            OrderError("the engine was closed while it was used; load the model again")
        )

    def _close(self) -> None:
        self.lifetime.closed = True
        self._compute.close()
        if self._sink is not None:
            self._sink.close()
        if self._stager is not None:
            self._stager.close()
        self._store.close()
