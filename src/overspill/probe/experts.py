"""Measures one expert: its upload, its times on CPU and GPU, and how these slow each other down.

Experts are measured in small groups, as the engine runs them, and in cycles through more memory
than the caches hold.
"""

import itertools
import queue
import statistics
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.compute.cpu_kernel import (
    BackwardRows,
    ExpertRows,
    WeightGradient,
    kernel_backward,
    kernel_forward,
    why_unsupported,
)
from overspill.compute.experts import wave_backward, wave_forward
from overspill.compute.permute import Permutation
from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertShape
from overspill.hardware.machine import available_memory
from overspill.hardware.profile import Curve, ExpertCosts
from overspill.probe.clock import BackgroundCopies, Effort, Steps, copy_seconds, seconds_of
from overspill.probe.measure import torch_threads
from overspill.probe.memory import buffers, cold_bytes, fill_with_noise
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress, device_slab
from overspill.trace.recorder import Recorder
from overspill.transfer.mapped import on_device
from overspill.transfer.streams import CopyStream, StreamEvent, record_event

TOKENS = (1, 4, 16, 64, 256, 1024)
_GROUP = 4
_FEW = 16  # tokens that an expert on the CPU typically has
_SETTLED = 64  # with fewer tokens reading the weights dominates, and the slope is noise
_MOST_ROWS = 4096  # of a group
_ROUNDS = 3
_LAUNCHES = 8  # on a GPU, before one synchronization, whose time must not dominate


def measure_expert(
    shape: ExpertShape,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    progress: Progress | None = None,
    tokens: Sequence[int] = TOKENS,
    effort: Effort | None = None,
) -> ExpertCosts:
    """Measure the costs of an expert, in a few seconds for most experts. Without a GPU, `device` is
    the CPU in its place."""
    reason = why_unsupported(dtype, shape, None)
    if reason is not None:
        raise ConfigError(f"the CPU kernel cannot compute such experts: {reason}")
    effort = effort or Effort()
    steps = Steps(progress, 10)
    steps.begin("experts: allocating memory")
    with torch_threads(threads), closing(_ExpertBench(shape, dtype, device, threads, effort)) as b:
        steps.begin("uploads")
        load = b.load()
        steps.begin("uploads beside CPU experts")
        load_beside, cpu_beside = b.contention(load)
        # a GPU needs one point more before its time grows with the tokens
        more = [*tokens, 4 * tokens[-1]] if device.type == "cuda" else tokens
        curves = {}
        for name, make, points in (
            ("cpu_forward", b.cpu_forward, tokens),
            ("cpu_backward", b.cpu_backward, tokens),
            ("cpu_training", partial(b.cpu_backward, need_dw=True), tokens),
            ("gpu_forward", b.gpu_forward, more),
            ("gpu_backward", b.gpu_backward, more),
            ("gpu_training", partial(b.gpu_backward, need_dw=True), more),
        ):
            steps.begin(name.replace("_", " ").replace("cpu", "CPU").replace("gpu", "GPU"))
            curves[name] = b.curve(make, points)
        steps.begin("a round trip to the CPU")
        round_trip = b.round_trip()
    steps.end()
    return ExpertCosts(
        shape=shape,
        dtype=dtype_name(dtype),
        threads=threads,
        load=load,
        load_beside=load_beside,
        cpu_beside=cpu_beside,
        round_trip=round_trip,
        **curves,
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _ExpertBench:
    """Experts in host memory, GPU slots for a group of them, and the measurements."""

    def __init__(
        self,
        shape: ExpertShape,
        dtype: torch.dtype,
        device: torch.device,
        threads: int,
        effort: Effort,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.threads, self.effort = threads, effort
        self.layout = RecordLayout(shape, dtype)
        size = self.layout.weight_bytes
        cold = cold_bytes() if effort.cold is None else effort.cold
        most = max(1, available_memory() // 4 // size)
        count = min(max(_GROUP, -(-cold // size)), most)
        self.group = min(_GROUP, count, _slots_that_fit(size, device))
        self.slots = device_slab(self.group, size, device)
        self.slab = buffers(count, size, pinned=device.type == "cuda")
        self.records = self.slab.memory.view(-1, size)
        self.next_record = itertools.cycle(range(count))
        self.lane = CopyStream("upload", device, Recorder(), None)
        fill_with_noise(self.layout.weights(self.records[0]), scale=0.02)
        self.records[1:] = self.records[0]
        self.slots.copy_(self.records[: self.group])

    def close(self) -> None:
        self.slab.close()
        self.slots = self.records = self.slots.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # budgets count cached memory

    def load(self) -> float:
        return copy_seconds(self.effort.seconds, self._uploads())

    def contention(self, load: float) -> tuple[float, float]:
        """Seconds of an upload while the CPU computes, and the factor by which the CPU is slower
        then. Both are measured in turn, so that other load on the machine affects them equally."""
        job = self.cpu_forward(_FEW, self.group).job
        rounds = []
        for _ in range(_ROUNDS):
            alone = seconds_of(job, self.effort.seconds)
            with self._uploads() as uploads:
                beside = seconds_of(job, self.effort.seconds, uploads.enough)
            rounds.append((alone, beside, uploads.seconds))
        alone, beside, upload = map(statistics.median, zip(*rounds, strict=True))
        # contention never makes anything faster: that would be noise
        return max(load, upload), max(1.0, beside / alone)

    def curve(self, make: "_MakeWork", tokens: Sequence[int]) -> Curve:
        """Seconds of one expert in a group. After a slow point the group has one expert, and the
        curve ends once the time grows with the tokens: extrapolation gives the rest."""
        points: list[tuple[int, float]] = []
        slow = False
        for count in tokens:
            work = make(count, 1 if slow else max(1, min(self.group, _MOST_ROWS // count)))
            # a GPU loads another kernel for another size
            warm_up = not points or self.device.type == "cuda"
            seconds = seconds_of(work.job, self.effort.seconds, warm_up=warm_up)
            points.append((count, seconds / work.experts))
            slow = slow or seconds > self.effort.slow
            growing = len(points) > 1 and points[-1][1] > 2 * points[-2][1]
            if slow and growing and count >= _SETTLED:
                break
        return rising(points)

    def cpu_forward(self, tokens: int, group: int) -> "_Work":
        x = self._tokens(tokens * group)
        y = torch.empty_like(x)

        def job() -> None:
            kernel_forward(x, y, self._experts(tokens, group), self.shape, self.threads)

        return _Work(job, group)

    def cpu_backward(self, tokens: int, group: int, need_dw: bool = False) -> "_Work":
        x, dy = self._tokens(tokens * group), self._tokens(tokens * group)
        weight = torch.full((len(x),), 0.5)
        rows = BackwardRows(x, dy, weight, torch.empty_like(x), torch.empty_like(weight))

        gradients = self._gradients(group) if need_dw else []

        def job() -> None:
            experts = self._experts(tokens, group)
            kernel_backward(rows, experts, self.shape, self.threads, gradients=gradients)

        return _Work(job, group)

    def gpu_forward(self, tokens: int, group: int) -> "_Work":
        x = self._tokens(tokens * group).to(self.device)
        wave = self._wave(tokens, group)
        return self._launched(lambda: wave_forward(x, *wave), group)

    def gpu_backward(self, tokens: int, group: int, need_dw: bool = False) -> "_Work":
        x, dy = (self._tokens(tokens * group).to(self.device) for _ in range(2))
        weight = torch.full((len(x),), 0.5, device=self.device)
        wave = self._wave(tokens, group)
        return self._launched(lambda: wave_backward(x, dy, weight, *wave, need_dw=need_dw), group)

    def _launched(self, launch: Callable[[], object], group: int) -> "_Work":
        if self.device.type != "cuda":
            return _Work(launch, group)

        def job() -> None:
            for _ in range(_LAUNCHES):
                launch()
            torch.cuda.synchronize(self.device)

        return _Work(job, group * _LAUNCHES)

    def round_trip(self) -> float:
        """A few token rows from the device to another thread, which copies them, and back."""
        with _RoundTrip(self.device, self._tokens(_FEW)) as trip:
            return seconds_of(trip.run, self.effort.seconds)

    def _uploads(self) -> BackgroundCopies:
        # by the number of a copy: next_record is for the measuring thread only
        records, slots = self.records, self.slots
        return BackgroundCopies(
            self.lane, lambda n: [(slots[n % self.group], records[n % len(records)])]
        )

    def _tokens(self, count: int) -> Tensor:
        x = torch.empty(count, self.shape.d_model, dtype=self.dtype)
        fill_with_noise(x, scale=1.0)
        return x

    def _experts(self, tokens: int, group: int) -> list[ExpertRows]:
        records = [self.layout.weights(self.records[next(self.next_record)]) for _ in range(group)]
        return [ExpertRows(r, n * tokens, (n + 1) * tokens) for n, r in enumerate(records)]

    def _gradients(self, group: int) -> list[WeightGradient]:
        memory, squares = torch.empty(group, self.shape.numel, dtype=self.dtype), torch.empty(group)
        return [WeightGradient(memory[n], squares[n]) for n in range(group)]

    def _wave(self, tokens: int, group: int) -> tuple[Tensor, ExpertShape, Tensor, list[int]]:
        """Arguments of wave_forward and wave_backward."""
        counts = [tokens] * group
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        weights = self.layout.weights(self.slots)[:group]
        return weights, self.shape, ends.to(self.device), counts


class _Work(NamedTuple):
    """A function to time, and the number of experts that one call computes."""

    job: Callable[[], object]
    experts: int


_MakeWork = Callable[[int, int], _Work]
"""Makes the work from the number of tokens of each expert and the number of experts."""


class _RoundTrip:
    """Passes token rows to a waiting thread and back as the engine does: rows are sorted, and GPU
    kernels write and read pinned memory."""

    def __init__(self, device: torch.device, rows: Tensor) -> None:
        self._device = device
        self._tokens = rows.to(device).repeat(8, 1)
        # two experts: every eighth token is of the one on the CPU
        self._ids = (torch.arange(len(self._tokens)) % 8 == 0).to(torch.int64).unsqueeze(1)
        self._counts = torch.bincount(self._ids.view(-1), minlength=2).tolist()
        self._slab = buffers(2, rows.nbytes, device.type == "cuda")
        self._received, self._answer = (self._view(self._slab[slot], rows) for slot in (0, 1))
        mapped = [on_device(self._slab[slot], device) for slot in (0, 1)]
        self._sent, self._returned = (self._view(slot, rows) for slot in mapped)
        self._each = torch.arange(len(rows), device=device)
        self._result = torch.empty_like(rows, device=device)
        self._marks: queue.SimpleQueue[StreamEvent | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="overspill-probe", daemon=True)

    @staticmethod
    def _view(row: Tensor, like: Tensor) -> Tensor:
        return row[: like.nbytes].view(like.dtype).view(like.shape)

    def __enter__(self) -> "_RoundTrip":
        self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._marks.put(None)
        self._worker.join()
        self._sent = self._returned = self._result
        self._slab.close()

    def run(self) -> None:
        rows = Permutation.on_host(self._ids, self._counts, {1}, self._device).row_token_R
        torch.index_select(self._tokens, 0, rows[self._counts[0] :], out=self._sent)
        self._marks.put(record_event(self._device, spin=True))
        error = self._answers.get()
        if error is not None:
            raise error
        torch.index_select(self._returned, 0, self._each, out=self._result)
        record_event(self._device, spin=True).wait()

    def _work(self) -> None:
        while (written := self._marks.get()) is not None:
            try:
                written.wait()  # until the GPU has written the rows
                self._answer.copy_(self._received)
                self._answers.put(None)
            except Exception as error:  # the main thread waits for an answer, and raises it
                self._answers.put(error)


def rising(points: Sequence[tuple[int, float]]) -> Curve:
    """The curve through `points`. A point slower than a later one was disturbed, and is lowered:
    more tokens never take less time."""
    tokens, seconds = zip(*points, strict=True)
    lowest_after = list(itertools.accumulate(reversed(seconds), min))
    return Curve(tokens, tuple(reversed(lowest_after)))


def _slots_that_fit(size: int, device: torch.device) -> int:
    """The number of slots that fit into a quarter of the free GPU memory; at least one."""
    if device.type != "cuda":
        return _GROUP
    return max(1, torch.cuda.mem_get_info(device)[0] // 4 // size)
