"""Experts that compute on the CPU, in the host memory where they live, beside the device's.

Only tokens travel. Both sides see the same pinned buffers: the device writes rows there and reads
results from there in its own kernels, so neither waits behind the uploads of experts on the link.

Two ways. Where an expert's weights may be read at once and nothing is learnt, a `Runner` does it:
the device's stream tells it by a number in memory that the rows are there, and waits for its number
in turn, while the interpreter goes on. Where gradients are made, or an expert has yet to be updated
or read from disk, a thread of ours waits for that first.
"""

import ctypes
import itertools
import queue
import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.compute.cpu import cpu_backward, cpu_forward
from overspill.compute.cpu_kernel import Rows, Segment, cpu_kernel_name
from overspill.compute.permute import row_weights
from overspill.compute.runner import Order, Runner
from overspill.core.errors import EngineError
from overspill.core.experts import ExpertId, Phase
from overspill.moe.course import Course
from overspill.moe.gradients import Gradients
from overspill.moe.host_buffers import HostBuffers, room_for_rows
from overspill.moe.host_job import Job, Notes
from overspill.moe.passes import LayerPass
from overspill.optim.kernel import AdamHyper
from overspill.tiers.slab import HostSlab
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.driver import await_signal, can_signal, signal
from overspill.transfer.lanes import Inject, Stamp, compute_mark
from overspill.transfer.mapped import on_device
from overspill.transfer.stager import Stager


class HostExperts:
    """The buffers, and the threads that hand groups of experts to the cores."""

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
        notes: Notes,
    ) -> None:
        self.store = store
        self.course = course
        self.gradients = gradients
        self.stager = stager
        self.device = device
        self.threads = threads
        self.recorder = recorder
        self.inject = inject
        self.notes = notes
        shape, dtype = store.layout.shape, store.layout.dtype
        self.max_rows = room_for_rows(shape.d_model, dtype)
        size = HostBuffers.size(self.max_rows, shape.d_model, dtype)
        self._slab = HostSlab("tokens", 1, size, store.pinned)
        self._host = HostBuffers.cut(self._slab[0], self.max_rows, shape.d_model, dtype)
        mapped = on_device(self._slab[0], device)
        self._device = HostBuffers.cut(mapped, self.max_rows, shape.d_model, dtype)
        self._each = torch.arange(self.max_rows, device=device)
        self._number = 0
        self._runner = self._new_runner()
        self._records: dict[int, Tensor] = {}  # weights by an expert's number: views take time
        self._ordered: deque[Job] = deque()  # that may still be at the runner
        self._before: Job | None = None  # the last of them
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._working = 0  # jobs at our own thread
        self._last: Job | None = None
        self._stream: torch.cuda.Stream | None = None  # of the last job
        self._thread: threading.Thread | None = None
        recorder.add_source(self._collect)

    def _new_runner(self) -> Runner | None:
        """None where all goes through our own thread: rows move, tests look on, no kernel."""
        if self.store.disk_rows or self.inject is not None or cpu_kernel_name() == "torch":
            return None
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if not can_signal(stream, self._host.there.data_ptr()):
                return None
        return Runner()

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes

    # -- what the main thread calls -------------------------------------------------------

    def forward(self, layer_pass: LayerPass, x_TD: Tensor) -> Job:
        """Begins the forward of the CPU's experts."""
        job = self._begin(layer_pass, Phase.FORWARD)
        self._send(job, layer_pass, [(x_TD, self._device.x)])
        return self._sent(job)

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
        job = self._begin(layer_pass, Phase.BACKWARD, need_dw, hyper)
        self._send(job, layer_pass, [(x_TD, self._device.x), (dy_TD, self._device.dy)])
        permutation = layer_pass.permutation
        assert permutation is not None
        own = row_weights(weights_TK, permutation, job.place.start, job.place.stop)
        self._device.weights[: job.rows] = own.to(torch.float32)
        return self._sent(job)

    def take(self, job: Job, out_RD: Tensor, dweights_R: Tensor | None = None) -> None:
        """Waits for the job and puts its results (y, or dx and the gradients of the routing
        weights) where they belong."""
        self._await(job)
        job.taken = Stamp(self.device)
        rows = job.place
        # a kernel reads the host's memory: a copy would have to queue behind the experts' uploads
        each = self._each[: job.rows]
        torch.index_select(self._device.out, 0, each, out=out_RD[rows])
        if dweights_R is not None:
            dweights_R[rows] = self._device.dweights.index_select(0, each).to(dweights_R.dtype)

    def _begin(
        self,
        layer_pass: LayerPass,
        phase: Phase,
        need_dw: bool = False,
        hyper: AdamHyper | None = None,
    ) -> Job:
        """A new job; the runner gets its order before the rows are there, so that it is awake."""
        self._leave_nobody_behind()
        ends = list(itertools.accumulate(layer_pass.counts[i] for i in sorted(layer_pass.on_host)))
        places = dict(
            zip(sorted(layer_pass.on_host), zip([0, *ends], ends, strict=False), strict=True)
        )
        kind = self.course.entered, layer_pass.layer, phase, layer_pass.activation
        job = Job(self, *kind, layer_pass.host_rows, places, need_dw, hyper)
        self._last = job
        segments = None if need_dw or self._runner is None else self._readable_now(job)
        if segments is not None:
            self._order(job, segments)
        return job

    def _leave_nobody_behind(self) -> None:
        """The buffers are one job's at a time: whoever's pass was given up half-way, or runs on
        another stream, has to be done with them."""
        last = self._last
        if last is not None and last.taken is None:
            if last.order is not None and last.sent is None:
                self._sent(last)  # or it would wait for its rows for ever
            self._await(last)
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def _readable_now(self, job: Job) -> list[Segment] | None:
        """The experts of a job, if the runner can compute all of them without waiting."""
        layout = self.store.layout
        counts = [stop - start for start, stop in job.places.values()]
        backward = job.phase is Phase.BACKWARD
        kind = layout.dtype, layout.shape, job.activation
        if not Runner.takes(counts, *kind, backward):
            return None
        segments = []
        with self.store.lock:
            for index, place in job.places.items():
                entry = self.store.entry(ExpertId(job.layer, index))
                if not entry.readable:
                    return None
                record = self._records.get(entry.number)
                if record is None:
                    record = layout.weights(self.store.host(entry, Part.WEIGHTS))
                    self._records[entry.number] = record
                segments.append(Segment(record, *place))
        return segments

    def _order(self, job: Job, segments: Sequence[Segment]) -> None:
        assert self._runner is not None
        host, shape = self._host, self.store.layout.shape
        self._number = (self._number + 1) & 0xFFFFFFFF
        flags = host.there.data_ptr(), host.done.data_ptr()
        job.order = Order(*flags, self._number, (ctypes.c_int64 * 2)())
        job.traced = self.recorder.enabled
        self._ordered.append(job)
        common = segments, shape, self.threads, job.order
        if job.phase is Phase.FORWARD:
            self._runner.forward(host.x, host.out, *common)
        else:
            rows = Rows(host.x, host.dy, host.weights, host.out, host.dweights)
            self._runner.backward(rows, *common)

    def _send(
        self, job: Job, layer_pass: LayerPass, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        permutation = layer_pass.permutation
        assert permutation is not None
        token = permutation.row_token_R[job.place]
        for tensor, buffer in pairs:
            torch.index_select(tensor.detach(), 0, token, out=buffer[: job.rows])

    def _sent(self, job: Job) -> Job:
        """The rows are in the buffers, or will be when the stream has come that far."""
        job.sent = Stamp(self.device)
        if job.order is None:
            job.made = compute_mark(self.device, spin=True)
            self._hand_over(job)
        elif self.device.type == "cuda":
            signal(torch.cuda.current_stream(self.device), job.order.there, job.order.number)
        else:
            self._host.there.view(torch.int32).fill_(_signed(job.order.number))
        self._collect()  # now that the CPU is busy
        return job

    def _await(self, job: Job) -> None:
        if job.order is None:
            with self.store.lock:
                self.store.wait_main(lambda: job.done)
        elif self.device.type == "cuda":
            # the stream waits, not the host
            await_signal(torch.cuda.current_stream(self.device), job.order.done, job.order.number)
        elif self._runner is None or not self._runner.wait(job.order):
            raise EngineError("the engine was closed while the CPU computed")

    def _collect(self) -> None:
        """Takes the times of orders that have been carried out. Any thread may ask."""
        with self.store.lock:
            while self._ordered:
                job = self._ordered[0]
                assert job.order is not None
                end = job.order.times[1]  # which is written last
                if not end:
                    return
                self._ordered.popleft()
                start = job.order.times[0]
                if job.traced:
                    size = len(job.places) * self.store.layout.weight_bytes
                    self.recorder.past_span("cpu compute", job.name, start, end, size)
                self._note(job, (end - start) / 1e9)

    def _note(self, job: Job, seconds: float) -> None:
        tokens = [stop - start for start, stop in job.places.values()]
        job.seconds = seconds
        before, self._before = self._before, job
        self.notes.note_job(job.phase, tokens, seconds)
        if before is not None and job.follows(before):
            # the stream has passed all of these: it wrote the rows of this job after them
            assert before.sent is not None
            assert before.taken is not None
            assert job.sent is not None
            self.notes.note_handover(before.sent.until(before.taken) - before.seconds)
            self.notes.note_gap(job.phase, max(0.0, before.taken.until(job.sent)))

    def idle(self) -> bool:
        """Under the lock: whether our own thread has carried out all jobs."""
        return self._working == 0

    # -- our own thread -------------------------------------------------------------------

    def _hand_over(self, job: Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="overspill-cpu", daemon=True)
            self._thread.start()
        with self.store.lock:
            self._working += 1
        self._jobs.put(job)

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if job.made is not None:
                    job.made.wait()
                self._carry_out(job)
                with self.store.lock:
                    job.done = True
                    self._working -= 1
                    self.store.wake_main.notify_all()
                del job  # and not only when the next one comes
        except BaseException as error:  # the main thread waits for the results
            self.store.fail(error)

    def _carry_out(self, job: Job) -> None:
        left = dict(job.places)
        while left:
            group = self._await_group(job, list(left))
            if self.inject is not None:
                self.inject("cpu")
            size = len(group) * self.store.layout.weight_bytes
            with self.recorder.span("cpu compute", job.name, size):
                self._compute(job, group, [left.pop(entry.id.index) for entry in group])
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
        entries = [self.store.entry(ExpertId(job.layer, i)) for i in indices]
        with self.store.lock:
            if self.stager is not None:
                self.stager.pump()
            self.store.wait_main(lambda: any(entry.readable for entry in entries))
            ready = [entry for entry in entries if entry.readable]
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
        common = segments, layout.shape, job.activation, self.threads
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
        """Ends the threads; after that nobody reads or writes the buffers."""
        if self._runner is not None:
            self._runner.close()
        self.recorder.remove_source(self._collect)
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._device = self._host
        self._records.clear()
        self._slab.close()


def _signed(number: int) -> int:
    """The same 32 bits, as torch has them."""
    return number - (1 << 32) if number >= 1 << 31 else number
