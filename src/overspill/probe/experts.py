"""What one expert costs here: to upload, to compute on either side, to update, and how much they
slow each other down.

Experts are measured in small groups, as the engine runs them, and go round in so much memory that
no cache holds the next one: a model's experts are never warm either.
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

from overspill.compute.cpu import cpu_backward, cpu_forward
from overspill.compute.cpu_kernel import Segment
from overspill.compute.experts import wave_backward, wave_forward
from overspill.compute.permute import Permutation
from overspill.core.errors import BudgetError
from overspill.core.experts import ExpertShape
from overspill.core.sizes import round_up
from overspill.hardware.machine import available_memory
from overspill.hardware.profile import Curve, ExpertCosts
from overspill.optim.kernel import AdamHyper, RecordState, adamw_
from overspill.probe.clock import Effort, Flow, Steps, flow_seconds, seconds_of
from overspill.probe.measure import torch_threads
from overspill.probe.pool import Pool, cold_bytes, fill_with_noise
from overspill.tiers.layout import ALIGN, RecordLayout
from overspill.tiers.slab import HostSlab, Progress, device_slab
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import CopyStream, StreamEvent, record_event
from overspill.transfer.mapped import on_device

TOKENS = (1, 4, 16, 64, 256, 1024)
_GROUP = 4
_FEW = 16  # tokens of an expert that the CPU is likely to get
_SETTLED = 64  # fewer tokens take the time of reading the weights: their slope is noise
_MOST_ROWS = 4096  # of a group
_ROUNDS = 3
_LAUNCHES = 8  # on a GPU; waited for together, or the waiting would be measured
_HYPER = AdamHyper(lr=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=10)


def measure_expert(
    shape: ExpertShape,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    progress: Progress | None = None,
    tokens: Sequence[int] = TOKENS,
    effort: Effort | None = None,
) -> ExpertCosts:
    """A few seconds for most experts. Without a GPU, `device` is the CPU and stands for one."""
    effort = effort or Effort()
    steps = Steps(progress, 11)
    steps.begin("experts: taking memory")
    with torch_threads(threads), closing(_Bench(shape, dtype, device, threads, effort)) as bench:
        steps.begin("uploads")
        load = bench.load()
        steps.begin("uploads beside CPU experts")
        load_beside, cpu_beside = bench.beside(load)
        curves = {}
        for name, make, points in bench.curves(tokens):
            steps.begin(name.replace("_", " ").replace("cpu", "CPU").replace("gpu", "GPU"))
            curves[name] = bench.curve(make, points)
        steps.begin("the optimizer")
        update, update_beside = bench.update()
        steps.begin("the way to the CPU and back")
        round_trip = bench.round_trip()
    steps.end()
    return ExpertCosts(
        shape=shape,
        dtype=dtype_name(dtype),
        threads=threads,
        load=load,
        load_beside=load_beside,
        cpu_beside=cpu_beside,
        update=update,
        update_beside=update_beside,
        round_trip=round_trip,
        **curves,
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Bench:
    """Some experts in host memory, slots for a group of them on the device, and what to do."""

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
        # weights and as much again for gradients, within half of what the host has left
        most = max(1, available_memory() // 4 // size)
        rows = min(max(_GROUP, -(-cold // size)), most)
        self.group = min(_GROUP, rows, _fitting(size, device))
        self.slots = device_slab(self.group, size, device)
        self.records = Pool(rows, size, pinned=device.type == "cuda")
        try:
            self.scratch = Pool(rows, size, pinned=False)
        except BudgetError:
            self.records.close()  # what is pinned would stay so
            raise
        self.lane = CopyStream("upload", device, Recorder(), None)
        fill_with_noise(self.layout.weights(self.records.rows[0]), scale=0.02)
        self.records.rows[1:] = self.records.rows[0]
        self.slots.copy_(self.records.rows[: self.group])

    def close(self) -> None:
        self.records.close()
        self.scratch.close()
        self.slots = self.slots.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # budgets count what is kept, and nothing of this is

    def load(self) -> float:
        return flow_seconds(self._uploads(), self.effort.seconds)

    def beside(self, load: float) -> tuple[float, float]:
        """Seconds of an upload while the CPU computes, and how many times longer that takes."""
        alone, beside, upload = self._in_company(self._cpu_forward(_FEW, self.group).job)
        # company does not make faster: that would be noise
        return max(load, upload), max(1.0, beside / alone)

    def _in_company(self, job: Callable[[], object]) -> tuple[float, float, float]:
        """Seconds of `job` alone, beside uploads, and of such an upload. In turn, a few times: what
        else the machine does meanwhile then disturbs one as much as the other."""
        rounds = []
        for _ in range(_ROUNDS):
            alone = seconds_of(job, self.effort.seconds)
            with self._uploads() as uploads:
                beside = seconds_of(job, self.effort.seconds, uploads.enough)
            rounds.append((alone, beside, uploads.seconds))
        alone, beside, upload = map(statistics.median, zip(*rounds, strict=True))
        return alone, beside, upload

    def curves(self, tokens: Sequence[int]) -> list[tuple[str, "_Make", Sequence[int]]]:
        """Each by its name in ExpertCosts: the work for so many tokens of each expert of a group.
        A GPU needs one point more before its time grows with the tokens."""
        more = [*tokens, 4 * tokens[-1]] if self.device.type == "cuda" else tokens
        return [
            ("cpu_forward", self._cpu_forward, tokens),
            ("cpu_backward", partial(self._cpu_backward, train=False), tokens),
            ("cpu_train", partial(self._cpu_backward, train=True), tokens),
            ("gpu_forward", self._gpu_forward, more),
            ("gpu_backward", partial(self._gpu_backward, train=False), more),
            ("gpu_train", partial(self._gpu_backward, train=True), more),
        ]

    def curve(self, make: "_Make", tokens: Sequence[int]) -> Curve:
        """One expert's share of a group; of a group of one after a point that was slow. Then it
        also ends where time has begun to grow with the tokens: a straight line tells the rest."""
        points: list[tuple[int, float]] = []
        slow = False
        for count in tokens:
            work = make(count, 1 if slow else self._experts(count))
            # on a GPU other sizes are other kernels, and each is loaded when it is first used
            warm_up = not points or self.device.type == "cuda"
            took = seconds_of(work.job, self.effort.seconds, warm_up=warm_up)
            points.append((count, took / work.experts))
            slow = slow or took > self.effort.slow
            growing = len(points) > 1 and points[-1][1] > 2 * points[-2][1]
            if slow and growing and count >= _SETTLED:
                break
        return rising(points)

    def _experts(self, tokens: int) -> int:
        return max(1, min(self.group, _MOST_ROWS // tokens))

    def _cpu_forward(self, tokens: int, group: int) -> "_Work":
        x = self._rows(tokens * group)
        y = torch.empty_like(x)

        def job() -> None:
            cpu_forward(x, y, self._segments(tokens, group), self.shape, None, self.threads)

        return _Work(job, group)

    def _cpu_backward(self, tokens: int, group: int, train: bool) -> "_Work":
        x, dy = self._rows(tokens * group), self._rows(tokens * group)
        weight = torch.full((len(x),), 0.5)
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)

        def job() -> None:
            gradients = None
            if train:
                gradients = [self.layout.weights(self.scratch.take()) for _ in range(group)]
            segments = self._segments(tokens, group)
            args = (segments, self.shape, None, self.threads, gradients)
            cpu_backward(x, dy, weight, dx, dweight, *args)

        return _Work(job, group)

    def _gpu_forward(self, tokens: int, group: int) -> "_Work":
        x = self._rows(tokens * group).to(self.device)
        wave = self._wave(tokens, group)
        return self._launched(lambda: wave_forward(x, *wave), group)

    def _gpu_backward(self, tokens: int, group: int, train: bool) -> "_Work":
        x, dy = (self._rows(tokens * group).to(self.device) for _ in range(2))
        weight = torch.full((len(x),), 0.5, device=self.device)
        wave = self._wave(tokens, group)
        return self._launched(lambda: wave_backward(x, dy, weight, *wave, need_dw=train), group)

    def _launched(self, launch: Callable[[], object], group: int) -> "_Work":
        if self.device.type != "cuda":
            return _Work(launch, group)

        def job() -> None:
            for _ in range(_LAUNCHES):
                launch()
            torch.cuda.synchronize(self.device)

        return _Work(job, group * _LAUNCHES)

    def update(self) -> tuple[float, float]:
        """Seconds for one expert alone and beside uploads. A large one is measured by a part of
        it: the time of a pass is that of its elements."""
        self.scratch.rows.zero_()
        flat = self.scratch.rows.view(-1)
        widths = (2 if self.dtype == torch.bfloat16 else 0, 4, 4)  # low bits, moments
        elements = min(self.shape.numel, (len(flat) - 64 * len(widths)) // sum(widths))
        sizes = [round_up(elements * width, 64) for width in widths]
        pieces = flat.split(sum(sizes))[: len(flat) // sum(sizes)]  # the last may be cut short
        states = [_state_parts(piece.split(sizes), elements) for piece in pieces]
        turn = itertools.cycle(states)

        def job() -> None:
            weight, grad = (self.layout.weights(self.records.take())[:elements] for _ in range(2))
            adamw_(RecordState(weight, *next(turn)), grad, _HYPER, self.threads)

        scale = self.shape.numel / elements
        alone, beside, _ = self._in_company(job)
        return alone * scale, max(alone, beside) * scale

    def round_trip(self) -> float:
        """A few rows from the device to another thread and back, which only copies them."""
        with _Courier(self.device, self._rows(_FEW)) as courier:
            return seconds_of(courier.send, self.effort.seconds)

    def _uploads(self) -> Flow:
        # the number of a copy, not take(): that belongs to the thread that measures
        rows = self.records.rows
        return Flow(self.lane, lambda n: [(self.slots[n % self.group], rows[n % len(rows)])])

    def _rows(self, count: int) -> Tensor:
        x = torch.empty(count, self.shape.d_model, dtype=self.dtype)
        fill_with_noise(x, scale=1.0)
        return x

    def _segments(self, tokens: int, group: int) -> list[Segment]:
        return [
            Segment(self.layout.weights(self.records.take()), n * tokens, (n + 1) * tokens)
            for n in range(group)
        ]

    def _wave(self, tokens: int, group: int) -> tuple[Tensor, ExpertShape, Tensor, list[int]]:
        """What wave_forward and wave_backward want to know of it."""
        counts = [tokens] * group
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        weights = self.layout.weights(self.slots)[:group]
        return weights, self.shape, ends.to(self.device), counts


class _Work(NamedTuple):
    """Something to time, and how many times one expert passes in a call of it."""

    job: Callable[[], object]
    experts: int


_Make = Callable[[int, int], _Work]
"""The work for so many tokens of each of so many experts."""


class _Courier:
    """Takes rows to a thread that waits for them, and their results back, by the steps that the
    engine takes: rows are sorted again, kernels write and read pinned memory."""

    def __init__(self, device: torch.device, rows: Tensor) -> None:
        self._device = device
        self._tokens = rows.to(device).repeat(8, 1)
        # two experts: every eighth token is of the one that computes elsewhere
        self._ids = (torch.arange(len(self._tokens)) % 8 == 0).to(torch.int64).unsqueeze(1)
        self._counts = torch.bincount(self._ids.view(-1), minlength=2).tolist()
        self._slab = HostSlab("measuring", 2, round_up(rows.nbytes, ALIGN), device.type == "cuda")
        self._there, self._back = (self._view(row, rows) for row in self._slab.rows)
        mapped = [on_device(row, device) for row in self._slab.rows]
        self._sent, self._answer = (self._view(row, rows) for row in mapped)
        self._each = torch.arange(len(rows), device=device)
        self._result = torch.empty_like(rows, device=device)
        self._orders: queue.SimpleQueue[StreamEvent | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="overspill-probe", daemon=True)

    @staticmethod
    def _view(row: Tensor, like: Tensor) -> Tensor:
        return row[: like.nbytes].view(like.dtype).view(like.shape)

    def __enter__(self) -> "_Courier":
        self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.put(None)
        self._worker.join()
        self._sent = self._answer = self._result
        self._slab.close()

    def send(self) -> None:
        rows = Permutation.on_host(self._ids, self._counts, {1}, self._device).row_token_R
        torch.index_select(self._tokens, 0, rows[self._counts[0] :], out=self._sent)
        self._orders.put(record_event(self._device, spin=True))
        failed = self._answers.get()
        if failed is not None:
            raise failed
        torch.index_select(self._answer, 0, self._each, out=self._result)
        record_event(self._device, spin=True).wait()

    def _work(self) -> None:
        while (arrived := self._orders.get()) is not None:
            try:
                arrived.wait()  # the rows are being written until then
                self._back.copy_(self._there)
                self._answers.put(None)
            except Exception as error:  # or the other thread would wait for ever
                self._answers.put(error)


def rising(points: Sequence[tuple[int, float]]) -> Curve:
    """The curve through `points`. One that took longer than a later one was disturbed: more
    tokens never take less time."""
    tokens, seconds = zip(*points, strict=True)
    lowest_after = list(itertools.accumulate(reversed(seconds), min))
    return Curve(tokens, tuple(reversed(lowest_after)))


def _fitting(size: int, device: torch.device) -> int:
    """How many slots may be taken for a moment on the device; one at least."""
    if device.type != "cuda":
        return _GROUP
    return max(1, torch.cuda.mem_get_info(device)[0] // 4 // size)


def _state_parts(parts: Sequence[Tensor], elements: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """What a RecordState has beside the weight: low bits if it is bf16, and the moments."""
    low, first, second = parts
    bits = low.view(torch.int16)[:elements] if len(low) else None
    return bits, first.view(torch.float32)[:elements], second.view(torch.float32)[:elements]
