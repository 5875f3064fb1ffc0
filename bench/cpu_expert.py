"""Speed of one expert on the CPU, without caching, compared with torch and memory bandwidth.

PYTHONPATH=src python3 bench/cpu_expert.py --out bench/results
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from record import Limit, metric, write_record
from torch import Tensor

from overspill.compute.cpu_kernel import (
    BackwardRows,
    ExpertRows,
    cpu_isa,
    kernel_backward,
    kernel_forward,
    read_bandwidth,
)
from overspill.compute.runner import CpuRequest, Runner
from overspill.core.experts import ExpertShape
from overspill.core.sizes import round_up
from overspill.hardware.machine import cpu_threads
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab

SHAPES = (ExpertShape(1024, 4096, gated=False), ExpertShape(4096, 14336, gated=False))
TOKENS = (1, 4, 16, 64)
DTYPE = torch.bfloat16
GIB = 1 << 30
CALLS = 24  # of one kind in a row
LEAD = 100e-6  # seconds between a runner's request and its token rows


class Timings(NamedTuple):
    """Seconds for one expert, for each repeat."""

    forward: list[float]  # by a runner, as in the engine
    call: list[float]  # by a direct call from Python
    torch: list[float]
    backward: list[float]


def weight_bytes(shape: ExpertShape) -> int:
    return shape.numel * DTYPE.itemsize


class Rotation:
    """Experts used in rotation: the others evict an expert from the caches before its next use."""

    def __init__(self, shape: ExpertShape, gib: float) -> None:
        self.shape = shape
        count = max(2, round(gib * GIB / weight_bytes(shape)))
        self._slab = HostSlab("experts", count, weight_bytes(shape), torch.cuda.is_available())
        self.records = [self._slab[number].view(DTYPE) for number in range(count)]
        self.records[0].normal_(0, 0.02)
        for record in self.records[1:]:
            record.copy_(self.records[0])
        self._next = 0

    def seconds(self, work: Callable[[Tensor], float | None]) -> float:
        """The median of some calls, each on the next expert; `work` may return its own time."""
        times = []
        for _ in range(min(CALLS, len(self.records))):
            record = self.records[self._next % len(self.records)]
            self._next += 1
            start = time.perf_counter()
            own = work(record)
            times.append(time.perf_counter() - start if own is None else own)
        return statistics.median(times)

    def close(self) -> None:
        self.records.clear()
        self._slab.close()


class Requests:
    """Computes with a runner, as the engine does: the request precedes its token rows."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._runner = Runner()
        self._flags = torch.zeros(32, dtype=torch.int32)  # two flags, in separate cache lines
        self._number = 0

    def forward(self, x: Tensor, y: Tensor, expert: ExpertRows, shape: ExpertShape) -> float:
        """Seconds from the moment when the runner sees that the rows are ready."""
        self._number += 1
        ready, done = self._flags[0].data_ptr(), self._flags[16].data_ptr()
        request = CpuRequest(ready, done, self._number, (ctypes.c_int64 * 2)())
        self._runner.forward(x, y, [expert], shape, self.threads, request)
        until = time.perf_counter() + LEAD
        while time.perf_counter() < until:
            pass
        self._flags[0] = self._number
        self._runner.wait(request)
        begin, end = request.times
        return (end - begin) / 1e9

    def close(self) -> None:
        self._runner.close()


def time_expert(experts: Rotation, requests: Requests, tokens: int, repeats: int) -> Timings:
    """Alternates between our forward, torch's and our backward, so that noise affects all."""
    shape, threads = experts.shape, requests.threads
    x, dy = (torch.randn(tokens, shape.d_model).to(DTYPE) for _ in range(2))
    y, dx = torch.empty_like(x), torch.empty_like(x)
    rows = BackwardRows(x, dy, torch.rand(tokens), dx, torch.empty(tokens))

    def forward(record: Tensor) -> float:
        return requests.forward(x, y, ExpertRows(record, 0, tokens), shape)

    def call(record: Tensor) -> None:
        kernel_forward(x, y, [ExpertRows(record, 0, tokens)], shape, threads)

    def by_torch(record: Tensor) -> None:
        w_in, w_out = record.view(2, -1)
        h = F.gelu(F.linear(x, w_in.view(shape.d_hidden, shape.d_model)))
        F.linear(h, w_out.view(shape.d_model, shape.d_hidden))

    def backward(record: Tensor) -> None:
        kernel_backward(rows, [ExpertRows(record, 0, tokens)], shape, threads)

    kinds = forward, call, by_torch, backward
    timings = Timings([], [], [], [])
    for work in kinds:
        work(experts.records[0])  # starts the threads
    for _ in range(repeats):
        for times, work in zip(timings, kinds, strict=True):
            times.append(experts.seconds(work))
    return timings


def row(shape: ExpertShape, tokens: int, timings: Timings, bandwidth: float) -> dict[str, Any]:
    """One row of the table; `bandwidth` in bytes per second."""
    size = weight_bytes(shape)
    forward, call, by_torch, backward = (statistics.median(times) for times in timings)
    return {
        "expert": f"{shape.d_model}×{shape.d_hidden}",
        "tokens": tokens,
        "forward": f"{forward * 1e3:.3f} ms",
        "weights read": f"{size / forward / 1e9:.1f} GB/s",
        "of host bandwidth": f"{size / forward / bandwidth:.0%}",
        "called from Python": f"{call * 1e3:.3f} ms",
        "torch": f"{by_torch * 1e3:.3f} ms",
        "bandwidth limit": f"{size / bandwidth * 1e3:.3f} ms",
        "backward": f"{backward * 1e3:.3f} ms",
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=cpu_threads(None))
    parser.add_argument("--gib", type=float, default=1.5, help="weights to rotate over, GiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the JSON record")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    threads = arguments.threads
    torch.set_num_threads(threads)
    reading = round_up(int(arguments.gib * GIB), ALIGN)
    memory = HostSlab("reading", 1, reading, torch.cuda.is_available())
    buffer = memory[0]
    requests = Requests(threads)
    # Measured again after each shape, and the best result counts: other processes can only lower
    # it, and a limit that is too low would give shares above 1.
    bandwidths = [read_bandwidth(buffer, threads)]
    measured = []
    for shape in SHAPES:
        experts = Rotation(shape, arguments.gib)
        for tokens in TOKENS:
            timings = time_expert(experts, requests, tokens, arguments.repeats)
            measured.append((shape, tokens, timings))
        experts.close()  # before the next shape allocates memory
        bandwidths.append(read_bandwidth(buffer, threads))
    requests.close()
    bandwidth = max(bandwidths)
    print(
        f"kernel {cpu_isa()}, {threads} threads; host memory, reading: {bandwidth / 1e9:.1f} GB/s"
    )
    rows, shares = [], {}
    for shape, tokens, timings in measured:
        rows.append(row(shape, tokens, timings, bandwidth))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
        values = [weight_bytes(shape) / seconds / bandwidth for seconds in timings.forward]
        name = f"share_{shape.d_model}x{shape.d_hidden}_{tokens}_tokens"
        shares[name] = metric(values, "share")
    write_record(
        "cpu-expert",
        {
            "row": f"one expert on the CPU, bf16, {threads} threads",
            "kernel": cpu_isa(),
            "threads": threads,
            "gib": arguments.gib,
            "repeats": arguments.repeats,
        },
        shares,
        Limit(
            1.0,
            "share",
            f"host memory at {bandwidth / 1e9:.1f} GB/s, read by {threads} threads in this run",
        ),
        arguments.out,
        rows,
    )


if __name__ == "__main__":
    main()
