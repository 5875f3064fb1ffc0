"""Experts that compute on the CPU, in the host memory where they live, beside the device's.

Only tokens travel. Both sides see the same pinned buffers: the device writes rows there and reads
results from there in its own kernels, so neither waits behind the uploads of experts on the link.
"""

import itertools
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.compute.cpu import Segment, cpu_backward, cpu_forward
from overspill.compute.permute import row_weights
from overspill.core.experts import ExpertId, Phase
from overspill.core.sizes import round_up
from overspill.moe.course import Course
from overspill.moe.gradients import Gradients
from overspill.moe.passes import LayerPass
from overspill.optim.kernel import AdamHyper
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import Inject, Mark, compute_mark
from overspill.transfer.mapped import on_device
from overspill.transfer.stager import Stager

_MOST_BYTES = 64 << 20
_MOST_ROWS = 4096
"""Tokens of one pass that the CPU takes at most: with more it would be no help."""


def room_for_rows(d_model: int, dtype: torch.dtype) -> int:
    """How many rows the buffers hold."""
    return max(1, min(_MOST_ROWS, _MOST_BYTES // (3 * d_model * dtype.itemsize)))


@dataclass
class Job:
    """The CPU's experts of one pass."""

    experts: "HostExperts"
    layer_pass: LayerPass
    phase: Phase
    rows: int
    made: Mark  # the rows are in the buffers
    need_dw: bool = False
    hyper: AdamHyper | None = None
    done: bool = False

    def take(self, out_RD: Tensor, dweights_R: Tensor | None = None) -> None:
        self.experts.take(self, out_RD, dweights_R)


class HostExperts:
    """The buffers, and the thread that hands groups of experts to the cores."""

    def __init__(
        self,
        store: ExpertStore,
        course: Course,
        gradients: Gradients,
        stager: Stager | None,
        device: torch.device,
        threads: int,
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        self.store = store
        self.course = course
        self.gradients = gradients
        self.stager = stager
        self.device = device
        self.threads = threads
        self.recorder = recorder
        self.inject = inject
        shape, dtype = store.layout.shape, store.layout.dtype
        self.max_rows = room_for_rows(shape.d_model, dtype)
        size = self.max_rows * (3 * shape.d_model * dtype.itemsize + 2 * 4)
        self._slab = HostSlab("tokens", 1, round_up(size, ALIGN), store.pinned)
        self._host = _Buffers.cut(self._slab[0], self.max_rows, shape.d_model, dtype)
        mapped = on_device(self._slab[0], device)
        self._device = _Buffers.cut(mapped, self.max_rows, shape.d_model, dtype)
        self._each = torch.arange(self.max_rows, device=device)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes

    # -- what the main thread calls -------------------------------------------------------

    def forward(self, layer_pass: LayerPass, x_TD: Tensor) -> Job:
        """Begins the forward of the CPU's experts."""
        rows = self._send(layer_pass, [(x_TD, self._device.x)])
        return self._submit(Job(self, layer_pass, Phase.FORWARD, rows, self._made()))

    def backward(
        self,
        layer_pass: LayerPass,
        x_TD: Tensor,
        dy_TD: Tensor,
        weights_TK: Tensor,
        need_dw: bool,
        hyper: AdamHyper | None,
    ) -> Job:
        """Begins their backward; with `need_dw` the gradients of the weights go their way too."""
        rows = self._send(layer_pass, [(x_TD, self._device.x), (dy_TD, self._device.dy)])
        permutation, place = layer_pass.permutation, layer_pass.host_rows
        assert permutation is not None
        own = row_weights(weights_TK, permutation, place.start, place.stop)
        self._device.weights[:rows] = own.to(torch.float32)
        job = Job(self, layer_pass, Phase.BACKWARD, rows, self._made(), need_dw, hyper)
        return self._submit(job)

    def take(self, job: Job, out_RD: Tensor, dweights_R: Tensor | None = None) -> None:
        """Waits for the job and puts its results (y, or dx and the gradients of the routing
        weights) where they belong."""
        with self.store.lock:
            self.store.wait_main(lambda: job.done)
        rows = job.layer_pass.host_rows
        # a kernel reads the host's memory: a copy would have to queue behind the experts' uploads
        each = self._each[: job.rows]
        torch.index_select(self._device.out, 0, each, out=out_RD[rows])
        if dweights_R is not None:
            dweights_R[rows] = self._device.dweights.index_select(0, each).to(dweights_R.dtype)

    def _send(self, layer_pass: LayerPass, pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
        if self._last is not None and not self._last.done:  # its pass was given up half-way
            with self.store.lock:
                last = self._last
                self.store.wait_main(lambda: last.done)
        permutation, place = layer_pass.permutation, layer_pass.host_rows
        assert permutation is not None
        rows: int = place.stop - place.start
        token = permutation.row_token_R[place]
        for tensor, buffer in pairs:
            torch.index_select(tensor.detach(), 0, token, out=buffer[:rows])
        return rows

    def _made(self) -> Mark:
        return compute_mark(self.device, spin=True)

    def _submit(self, job: Job) -> Job:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="overspill-cpu", daemon=True)
            self._thread.start()
        self._last = job
        self._jobs.put(job)
        return job

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job.made.wait()
                self._carry_out(job)
                with self.store.lock:
                    job.done = True
                    self.store.wake_main.notify_all()
        except BaseException as error:  # the main thread waits for the results
            self.store.fail(error)

    def _carry_out(self, job: Job) -> None:
        segments, start = {}, 0
        for index in sorted(job.layer_pass.on_host):
            stop = start + job.layer_pass.counts[index]
            segments[index] = (start, stop)
            start = stop
        while segments:
            group = self._await_group(job, list(segments))
            if self.inject is not None:
                self.inject("cpu")
            name = f"{job.phase.value} {job.layer_pass.layer}: {_names(group)}"
            size = len(group) * self.store.layout.weight_bytes
            with self.recorder.span("cpu compute", name, size):
                self._compute(job, group, [segments.pop(entry.id.index) for entry in group])
            with self.store.lock:
                for entry in group:
                    entry.queued -= 1
                self.course.leave([entry.id.index for entry in group])
                if self.stager is not None:
                    self.stager.pump()  # their rows may be wanted by others
                self.store.wake_main.notify_all()

    def _await_group(self, job: Job, indices: Sequence[int]) -> list[Entry]:
        """Waits until the weights of some of the experts may be read, and holds their rows. All of
        them at once, but where gradients are made one by one: each needs a buffer of its own."""
        entries = [self.store.entry(ExpertId(job.layer_pass.layer, i)) for i in indices]
        with self.store.lock:
            if self.stager is not None:
                self.stager.pump()
            self.store.wait_main(lambda: any(map(_readable, entries)))
            ready = [entry for entry in entries if _readable(entry)]
            group = ready[:1] if job.need_dw else ready
            for entry in group:
                entry.queued += 1  # from here on the row stays, whoever asks for one
            return group

    def _compute(self, job: Job, group: list[Entry], places: list[tuple[int, int]]) -> None:
        layout, host = self.store.layout, self._host
        segments = [
            Segment(layout.weights(self.store.host(entry, Part.WEIGHTS)), *place)
            for entry, place in zip(group, places, strict=True)
        ]
        common = segments, layout.shape, job.layer_pass.activation, self.threads
        if job.phase is Phase.FORWARD:
            cpu_forward(host.x, host.out, *common)
            return
        tensors = host.x, host.dy, host.weights, host.out, host.dweights
        if not job.need_dw:
            cpu_backward(*tensors, *common)
            return

        def write(gradient: Tensor) -> float:
            return cpu_backward(*tensors, *common, gradients=[gradient])[0]

        (entry,) = group
        self.gradients.make(entry, write, job.hyper)

    def close(self) -> None:
        """Ends the thread; after that nobody reads or writes the buffers."""
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._device = self._host
        self._slab.close()


@dataclass(frozen=True)
class _Buffers:
    """The rows of a pass, as one side sees them."""

    x: Tensor
    dy: Tensor
    out: Tensor
    weights: Tensor
    dweights: Tensor

    @classmethod
    def cut(cls, flat: Tensor, rows: int, d_model: int, dtype: torch.dtype) -> "_Buffers":
        size = rows * d_model * dtype.itemsize
        wide = [flat[at : at + size].view(dtype).view(rows, d_model) for at in (0, size, 2 * size)]
        ends = [3 * size, 3 * size + rows * 4, 3 * size + rows * 8]
        narrow = [flat[a:b].view(torch.float32) for a, b in itertools.pairwise(ends)]
        return cls(*wide, *narrow)


def _readable(entry: Entry) -> bool:
    return not entry.stale and entry.row is not None and bool(entry.have & Part.WEIGHTS)


def _names(group: Sequence[Entry]) -> str:
    return ", ".join(str(entry.id.index) for entry in group)
