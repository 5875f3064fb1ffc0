"""Experts that the CPU computes from their host slots while the GPU computes others.

Only token rows are transferred, through pinned buffers that both sides address. Kernels of the GPU
write rows and read results there, so neither waits behind uploads. A native `Runner` computes: the
GPU's stream writes a number to memory when the rows are written, and waits for the runner's number,
while the interpreter continues.
"""

import ctypes
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.compute.activation import form_of
from overspill.compute.activation_form import Form
from overspill.compute.cpu_kernel import BackwardRows, ExpertRows, GradientKind, WeightGradient
from overspill.compute.runner import CpuRequest, Runner
from overspill.core.errors import EngineError
from overspill.core.experts import Phase
from overspill.moe.dispatch import Dispatcher
from overspill.moe.layer_pass import LayerPass
from overspill.moe.streaming.cpu_buffers import CpuBuffers, max_cpu_rows
from overspill.moe.streaming.cpu_split import CpuSplit
from overspill.moe.streaming.step_cursor import StepCursor
from overspill.tiers.entry import Part
from overspill.tiers.slab import HostSlab
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.driver import await_signal, can_signal, signal
from overspill.transfer.mapped import on_device
from overspill.transfer.streams import Inject, StreamEvent, Timestamp


@dataclass(eq=False)
class CpuJob:
    """The CPU experts of one pass. It does not hold the pass: freeing a graph must free it."""

    owner: "CpuExperts"
    number: int  # of the pass
    layer: int
    phase: Phase
    rows: slice  # among the token rows of the pass
    places: dict[int, tuple[int, int]]  # rows of each expert in the buffers
    request: CpuRequest
    form: Form
    gradients: Mapping[int, WeightGradient]  # by position; empty without weight gradients
    traced: bool
    sent: Timestamp | None = None
    taken: Timestamp | None = None
    seconds: float = 0.0

    @property
    def n_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def label(self) -> str:
        return f"{self.phase.value} {self.layer}: {', '.join(map(str, self.places))}"

    def follows(self, other: "CpuJob") -> bool:
        """Whether it is the next layer's, in the same direction, and both have ended."""
        if self.phase is not other.phase or self.number != other.number + 1:
            return False
        if abs(self.layer - other.layer) != 1:  # the first layer after the last: another batch
            return False
        return None not in (other.sent, other.taken, self.sent)

    def take(self, out_RD: Tensor, drow_weight_R: Tensor | None = None) -> None:
        """Wait for the job and write its results into their rows: y, or in backward dx and the
        gradients of the routing weights."""
        self.owner.take(self, out_RD, drow_weight_R)

    @property
    def end(self) -> StreamEvent:
        """The event after which weights are not read any more, and weight gradients are
        complete."""
        return StreamEvent(_JobEnd(self))


class _JobEnd:
    """The end of a job as an event."""

    def __init__(self, job: CpuJob) -> None:
        self._owner, self._request = job.owner, job.request

    def record(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("the runner records it")

    def wait(self, stream: torch.cuda.Stream) -> None:
        await_signal(stream, self._request.done, self._request.number)

    def query(self) -> bool:
        return self._request.times[1] != 0  # written last

    def synchronize(self) -> None:
        self._owner.await_end(self._request)


class CpuExperts:
    """The buffers and the runner."""

    def __init__(
        self,
        store: ExpertStore,
        cursor: StepCursor,
        dispatcher: Dispatcher,
        split: CpuSplit,
        device: torch.device,
        threads: int,
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        self._store = store
        self._places = store.places
        self._cursor = cursor
        self._dispatcher = dispatcher
        self._split = split
        self._device = device
        self._threads = threads
        self._recorder = recorder
        shape, dtype = store.memory.layout.shape, store.memory.layout.dtype
        max_rows = max_cpu_rows(shape.d_model, dtype)
        size = CpuBuffers.size(max_rows, shape.d_model, dtype)
        self._slab = HostSlab("token rows", 1, size, store.memory.pinned)
        self._host = CpuBuffers.cut(self._slab[0], max_rows, shape.d_model, dtype)
        mapped = on_device(self._slab[0], device)
        self._mapped = CpuBuffers.cut(mapped, max_rows, shape.d_model, dtype)
        self._indices = torch.arange(max_rows, device=device)
        self._last_number = 0
        self._records: dict[int, Tensor] = {}  # weights by host slot: views take time
        self._running: deque[CpuJob] = deque()
        self._last: CpuJob | None = None
        self._last_finished: CpuJob | None = None
        self._stream: torch.cuda.Stream | None = None  # of the last job
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            if not can_signal(stream, self._host.ready.data_ptr()):
                raise EngineError(
                    "CPU experts need stream memory operations, which the CUDA driver lacks; set "
                    "cpu_experts=False"
                )
        self._runner = Runner(inject, store.sync)
        recorder.add_source(self._collect)

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes

    def forward(self, layer_pass: LayerPass, x_TD: Tensor) -> CpuJob:
        """Start the forward of the pass's CPU experts."""
        job = self._begin(layer_pass, Phase.FORWARD, {})
        self._send(job, layer_pass, [(x_TD, self._mapped.x)])
        return self._sent(job)

    def backward(
        self,
        layer_pass: LayerPass,
        x_TD: Tensor,
        dy_TD: Tensor,
        weights_TK: Tensor,
        gradients: Mapping[int, WeightGradient],
    ) -> CpuJob:
        """Start their backward. `gradients` are the places of weight gradients, if these are made:
        for each of the experts, by position."""
        job = self._begin(layer_pass, Phase.BACKWARD, gradients)
        self._send(job, layer_pass, [(x_TD, self._mapped.x), (dy_TD, self._mapped.dy)])
        own = self._dispatcher.row_weights(
            layer_pass.rows, weights_TK, job.rows.start, job.rows.stop
        )
        self._mapped.weights[: job.n_rows] = own.to(torch.float32)
        return self._sent(job)

    def take(self, job: CpuJob, out_RD: Tensor, drow_weight_R: Tensor | None) -> None:
        """Wait for the job and write its results into its rows."""
        self._wait(job)
        job.taken = Timestamp(self._device)
        # a kernel reads host memory: a copy would wait behind the uploads
        indices = self._indices[: job.n_rows]
        torch.index_select(self._mapped.out, 0, indices, out=out_RD[job.rows])
        if drow_weight_R is not None:
            own = self._mapped.dweights.index_select(0, indices)
            drow_weight_R[job.rows] = own.to(drow_weight_R.dtype)

    def wait_idle(self) -> None:
        """Block the host until no job reads weights. A job whose pass failed before its rows were
        sent does not start before the next one."""
        if self._last is not None and self._last.sent is not None:
            self._runner.wait(self._last.request)

    def end_job(self) -> None:
        """Block the host until no job reads weights or writes weight gradients. A job whose pass
        failed before its rows were sent computes with the present content of the buffers."""
        if self._last is not None:
            if self._last.sent is None:
                self._sent(self._last)
            self._runner.wait_end(self._last.request)

    def await_end(self, request: CpuRequest) -> None:
        """Block any thread until the request is done."""
        if not self._runner.wait_end(request):
            raise EngineError("the engine was closed while the CPU computed experts")

    def _begin(
        self, layer_pass: LayerPass, phase: Phase, gradients: Mapping[int, WeightGradient]
    ) -> CpuJob:
        """Create a job. The runner gets its request before the rows are sent, to wake up."""
        self._runner.check()
        self._finish_last()
        counts = layer_pass.rows.counts
        form = form_of(layer_pass.activation, self._store.memory.layout.shape.gated)
        assert counts is not None
        assert form is not None  # else the CPU gets no experts
        positions = sorted(layer_pass.on_cpu)
        ends = list(itertools.accumulate(counts[position] for position in positions))
        places = dict(zip(positions, itertools.pairwise([0, *ends]), strict=True))
        self._last_number = (self._last_number + 1) & 0xFFFFFFFF
        flags = self._host.ready.data_ptr(), self._host.done.data_ptr()
        job = CpuJob(
            self,
            self._cursor.passes,
            layer_pass.layer,
            phase,
            layer_pass.cpu_rows,
            places,
            CpuRequest(*flags, self._last_number, (ctypes.c_int64 * 2)()),
            form,
            gradients,
            self._recorder.enabled,
        )
        self._submit(job)
        # only now: the next job waits for this one, which must not be lost
        self._last = job
        self._running.append(job)
        return job

    def _submit(self, job: CpuJob) -> None:
        host, shape = self._host, self._store.memory.layout.shape
        common = self._expert_rows(job), shape, self._threads, job.request, job.form
        if job.phase is Phase.FORWARD:
            self._runner.forward(host.x, host.out, *common)
        else:
            rows = BackwardRows(host.x, host.dy, host.weights, host.out, host.dweights)
            gradients = [job.gradients[position] for position in job.places if job.gradients]
            self._runner.backward(rows, *common, gradients)

    def _expert_rows(self, job: CpuJob) -> list[ExpertRows]:
        found = []
        for position, place in job.places.items():
            entry = self._places.at(job.layer, position)
            assert entry.host_slot is not None
            record = self._records.get(entry.host_slot)
            if record is None:
                record = self._store.memory.layout.weights(self._store.host(entry, Part.WEIGHTS))
                self._records[entry.host_slot] = record
            found.append(ExpertRows(record, *place))
        return found

    def _finish_last(self) -> None:
        """The buffers belong to one job at a time: a job whose pass failed, or that ran on another
        stream, must have ended."""
        last = self._last
        if last is not None and last.taken is None:
            if last.sent is None:
                self._sent(last)  # else it would wait for its rows for ever
            self._wait(last)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def _send(
        self, job: CpuJob, layer_pass: LayerPass, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        tokens = layer_pass.rows.permutation.row_token_R[job.rows]
        for tensor, buffer in pairs:
            torch.index_select(tensor.detach(), 0, tokens, out=buffer[: job.n_rows])

    def _sent(self, job: CpuJob) -> CpuJob:
        """The rows are in the buffers, or will be when the stream reaches this point."""
        sent = Timestamp(self._device)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            signal(stream, job.request.ready, job.request.number)
        else:
            self._host.ready.view(torch.int32).fill_(_signed(job.request.number))
        job.sent = sent  # only now: if the signal fails, `_finish_last` repeats it
        self._collect()  # while the CPU is busy
        return job

    def _wait(self, job: CpuJob) -> None:
        if self._device.type == "cuda":
            # the stream waits, not the host
            stream = torch.cuda.current_stream(self._device)
            await_signal(stream, job.request.done, job.request.number)
        elif not self._runner.wait(job.request):
            raise EngineError("the engine was closed while the CPU computed experts")

    def _collect(self) -> None:
        """Note the times of jobs that have ended. Any thread may call it."""
        with self._store.sync.lock:
            while self._running:
                times = self._running[0].request.times
                if not times[1]:  # written last, so it is read first
                    return
                start, end = times
                job = self._running.popleft()
                if job.traced:
                    size = len(job.places) * self._store.memory.layout.weight_bytes
                    self._recorder.past_span("cpu compute", job.label, start, end, size)
                self._note(job, (end - start) / 1e9)

    def _note(self, job: CpuJob, seconds: float) -> None:
        counts: list[int] = []
        factored: list[int] = []
        for position, (start, stop) in job.places.items():
            gradient = job.gradients.get(position)
            is_factored = gradient is not None and gradient.kind is GradientKind.FACTORED
            (factored if is_factored else counts).append(stop - start)
        job.seconds = seconds
        before, self._last_finished = self._last_finished, job
        need_dw = bool(job.gradients)
        self._split.note_job(job.phase, counts, seconds, need_dw, factored)
        if before is not None and job.follows(before):
            # the stream has passed all of these points: it wrote this job's rows after them
            assert before.sent is not None
            assert before.taken is not None
            assert job.sent is not None
            handover = before.sent.seconds_until(before.taken) - before.seconds
            self._split.note_handover(handover)
            gap = max(0.0, before.taken.seconds_until(job.sent))
            self._split.note_gap(job.phase, gap, need_dw)

    def close(self) -> None:
        """End the runner; after that nothing reads or writes the buffers."""
        self._runner.close()
        self._recorder.remove_source(self._collect)
        self._mapped = self._host
        self._records.clear()
        self._slab.close()


def _signed(number: int) -> int:
    """Return the same 32 bits as a signed number."""
    return number - (1 << 32) if number >= 1 << 31 else number
