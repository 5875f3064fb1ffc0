"""Everything that streams experts: GPU slots and their uploads, gradients and updates, the disk."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import torch

from overspill.core.errors import OrderError
from overspill.core.experts import Phase
from overspill.core.interrupt import DeferredInterrupt
from overspill.hardware.machine import cpu_threads
from overspill.hardware.profile import ExpertCosts
from overspill.moe.dispatch import Dispatcher
from overspill.moe.settings import Settings
from overspill.moe.streaming.compute import StreamingCompute
from overspill.moe.streaming.cpu_split import RowLimits
from overspill.moe.streaming.gradients import StreamingGradients
from overspill.plan.budget import Placement
from overspill.tiers.entry import Entry, Part
from overspill.tiers.replicas import Replica
from overspill.tiers.shared_experts import SharedExperts
from overspill.tiers.slab import Progress, device_slab
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.outboxes import Outboxes
from overspill.transfer.stager import Stager
from overspill.transfer.streams import CopyStream

_SSD_WORKERS = 4  # for reads, and as many for writes
_log = logging.getLogger("overspill")


class Streaming:
    """Compute, gradients and disk transfers of streamed experts. Uploads run ahead of compute,
    gradients leave as they are made, updates run while the device continues, and the next upload of
    an expert waits only for its own update."""

    def __init__(
        self,
        store: ExpertStore,
        dispatcher: Dispatcher,
        device: torch.device,
        placement: Placement,
        settings: Settings,
        recorder: Recorder,
        updates_at_once: Callable[[], bool],
        progress: Progress | None = None,
        costs: ExpertCosts | None = None,
        shared: SharedExperts | None = None,
    ) -> None:
        """`updates_at_once` says whether a backward that runs now would update experts."""
        layout = store.memory.layout
        self._store = store
        self._sync = store.sync
        self._places = store.places
        self._updates_at_once = updates_at_once
        self._interrupted = False
        self.gradients: StreamingGradients | None = None
        with ExitStack() as undo:  # a failure leaves no thread
            slab = device_slab(placement.slots, layout.weight_bytes, device)
            threads = cpu_threads(settings.threads)
            self.compute = StreamingCompute(
                store, dispatcher, slab, device, placement, settings, recorder, threads, costs, self
            )
            undo.callback(self.compute.close)
            if placement.training:
                download = CopyStream("download", device, recorder, settings.inject)
                outboxes = None if shared is None else Outboxes(shared, store)
                self.gradients = StreamingGradients(
                    store,
                    self.compute.cursor,
                    placement,
                    settings,
                    download,
                    self.compute.trace,
                    threads,
                    device,
                    self.compute.wait_readers,
                    progress,
                    outboxes,
                    self.compute.end_cpu_job,
                )
            self._stager: Stager | None = None
            if store.places.disk_slots:
                inject, training = settings.inject, placement.training
                self._stager = Stager(store, self._needs, _SSD_WORKERS, recorder, inject, training)
            undo.pop_all()

    # -- the optimizer, as `CpuSplit` sees it -------------------------------------------------

    def row_limits(self) -> RowLimits | None:
        if self.gradients is None:
            return RowLimits(0, 0)
        return self.gradients.formed.limits(self._updates_at_once())

    def seconds(self, layer: int, phase: Phase, need_dw: bool) -> float:
        """In forward, pending updates of the layer, or its share of all: this and later passes wait
        for them. In backward the updates that follow from it."""
        if self.gradients is None:
            return 0.0
        number, updates = 0.0, self.gradients.copies.updates
        if phase is Phase.FORWARD:
            own = sum(entry.stale for entry in self._places.streamed(layer))
            number = max(own, updates.pending / (self._places.n_layers - layer))
        elif need_dw and self._updates_at_once():
            number = len(self._places.streamed(layer))
        return number * updates.seconds

    # -- needs and settings -------------------------------------------------------------------

    def _needs(self) -> Iterator[tuple[Entry, Part]]:
        """Yield the parts that should be in host slots: of experts with a pending update, then in
        the order of need."""
        if self.gradients is not None:
            yield from self.gradients.copies.waiting()
        for layer, position, states in self.compute.cursor.needed(self._updates_at_once()):
            parts = Part.WEIGHTS | Part.STATES if states else Part.WEIGHTS
            entry = self._places.at(layer, position)
            if states or self._store.replicas.of(entry) is None:
                yield entry, parts

    def set_settings(self, settings: Settings) -> None:
        """Change the settings, while nothing is being computed or transferred."""
        if settings.cpu_experts and self.compute.split is None:
            _log.warning("cpu_experts: nothing was measured; set it when the model is offloaded")
        self.compute.set_settings(settings)  # first: it may refuse them
        if self.gradients is not None:
            self.gradients.overlap_updates = settings.overlap_updates

    def lend(self, replicas: Mapping[int, Replica]) -> None:
        """Let uploads read these replicas in place of host memory, and no others from now on."""
        with self._sync.lock:
            self._store.replicas.lent = replicas
            self._sync.wake_uploader()  # experts on disk may have one
        self.compute.uploader.withdraw_replicas()
        self._store.disk.request_transfers()

    def stop_uploads(self) -> None:
        """Drop uploads that were not issued; the next pass asks for those it needs."""
        with self._sync.lock:
            self.compute.uploader.set_targets([])

    def residents_changed(self) -> None:
        """Adapt to other streamed experts, between steps."""
        if self.gradients is not None:
            self.gradients.host_gradients.reset()
        self.stop_uploads()
        self._store.disk.request_transfers()

    def wait(self) -> None:
        """Wait until every transfer and update has ended."""
        self._sync.wake_all()  # an interrupt may have come before a thread was woken
        if self.gradients is not None:
            self.gradients.wait()
        # all at once: a task that ends may let another begin
        what = "pending transfers and updates (uploader, update thread, disk transfers)"
        self._sync.wait(self._idle, what)
        self.compute.wait_readers()

    def _idle(self) -> bool:
        stager_idle = self._stager is None or self._stager.idle()
        updates_idle = self.gradients is None or self.gradients.copies.updates.idle()
        return updates_idle and stager_idle and self.compute.uploader.idle()

    def check_conserved(self) -> None:
        self.compute.plan.check_conserved()
        if self.gradients is not None:
            self.gradients.check_conserved()

    @property
    def device_bytes(self) -> int:
        """Memory of the GPU slots and of gradients that are accumulated or read on the device."""
        size = self.compute.uploader.slab.nbytes
        if self.gradients is not None:
            size += self.gradients.on_device.nbytes + self.gradients.host_gradients.buffer.nbytes
        return size

    @property
    def host_bytes(self) -> int:
        """Host memory of host slots and buffers."""
        gradients = self.gradients
        host = self._store.memory.host_bytes if gradients is None else gradients.host_bytes()
        return host + self.compute.cpu_bytes

    def recover(self) -> None:
        """Before a pass or a move, under the engine's lock: in inference a transfer that has failed
        loses nothing, so transfers begin anew. In training the failure stays."""
        error = self._sync.error
        if error is None or self.gradients is not None or self._interrupted:
            return
        _log.warning("transfers of experts begin anew after a failure: %s", error)
        # memory allocated here outlives an inference mode of the caller
        with DeferredInterrupt(), torch.inference_mode(False), torch.no_grad():
            self.compute.restart_uploads()
            self._store.recover()

    def interrupt(self) -> None:
        """Make a pass of another thread raise where it waits."""
        self._interrupted = True
        self._sync.fail(OrderError("the engine was closed while it was used; load the model again"))

    def close(self) -> None:
        self.compute.close()
        if self.gradients is not None:
            self.gradients.close()
        if self._stager is not None:
            self._stager.close()
