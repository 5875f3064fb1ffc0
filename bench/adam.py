"""Speed of the CPU's AdamW kernel on expert records that are not in a cache.

PYTHONPATH=src python3 bench/adam.py --out bench/results
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from record import Limit, Metric, metric, write_record
from torch import Tensor

from overspill.optim.arguments import AdamHyper, RecordState
from overspill.optim.kernel import adamw_, kernel_name

NUMEL = 3 * 1024 * 4096  # one gated expert of 1024×4096: 12.58 M parameters
GIB = 1 << 30
# Bytes moved per parameter: weight, low and moments read and written, the gradient read.
BYTES = {torch.float32: 2 * (2 + 2 + 4 + 4) + 2, torch.bfloat16: 2 * (2 + 2 + 2 + 2) + 2}
NAMES = {torch.float32: "adam-kernel-fp32", torch.bfloat16: "adam-kernel-bf16"}
HYPER = AdamHyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10)


class Timing(NamedTuple):
    """Parameters per second with one thread count, for each repeat."""

    threads: int
    rates: list[float]

    def speed(self) -> Metric:
        return metric([rate / 1e9 for rate in self.rates], "Gparam/s")

    def traffic(self, moments: torch.dtype) -> Metric:
        return metric([rate * BYTES[moments] / 1e9 for rate in self.rates], "GB/s")


def make_records(gib: float, moments: torch.dtype) -> list[tuple[RecordState, Tensor]]:
    """At least two records, and as many as fill `gib`; every page is touched."""

    def make() -> tuple[RecordState, Tensor]:
        state = RecordState(
            torch.full((NUMEL,), 0.02, dtype=torch.bfloat16),
            torch.full((NUMEL,), 3, dtype=torch.int16),
            torch.full((NUMEL,), 1e-4, dtype=moments),
            torch.full((NUMEL,), 1e-7, dtype=moments),
        )
        return state, torch.full((NUMEL,), 1e-3, dtype=torch.bfloat16)

    size = NUMEL * (6 + 2 * moments.itemsize)
    return [make() for _ in range(max(2, round(gib * GIB / size)))]


def seconds_each(work: Callable[[], object], repeats: int) -> list[float]:
    work()  # starts the threads and compiles the library
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def host_bandwidth(gib: float, threads: int, repeats: int) -> float:
    """Bytes per second, reads plus writes, of a parallel read-modify-write of one large buffer: the
    fastest of the repeats, because it is a limit."""
    torch.set_num_threads(threads)
    buffer = torch.zeros(int(gib * GIB) // 4)
    times = seconds_each(lambda: buffer.add_(1.0), repeats)
    return 2 * buffer.nbytes / min(times)


def time_kernel(records: list[tuple[RecordState, Tensor]], threads: int, repeats: int) -> Timing:
    def one_pass() -> None:
        for state, grad in records:
            adamw_(state, grad, HYPER, threads)

    numel = NUMEL * len(records)
    return Timing(threads, [numel / seconds for seconds in seconds_each(one_pass, repeats)])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cores = os.cpu_count() or 1
    parser.add_argument("--gib", type=float, default=8.0, help="working set, GiB (default 8)")
    parser.add_argument("--threads", type=int, default=max(1, cores - 2))
    parser.add_argument("--sweep", action="store_true", help="also measure 8 to 16 threads")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the JSON records")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    cores = os.cpu_count() or 1
    counts = [arguments.threads]
    if arguments.sweep:
        counts = sorted({arguments.threads, *(n for n in range(8, 17) if n <= cores)})
    bandwidth = max(host_bandwidth(arguments.gib, n, arguments.repeats) for n in counts) / 1e9
    print(f"kernel {kernel_name()}; host memory, read and write: {bandwidth:.1f} GB/s")
    print(f"{'moments':>8} {'threads':>8} {'Gparam/s':>9} {'low':>6} {'high':>6} {'GB/s':>6} share")
    for moments, name in NAMES.items():
        records = make_records(arguments.gib, moments)
        timings = [time_kernel(records, n, arguments.repeats) for n in counts]
        kind = "fp32" if moments == torch.float32 else "bf16"
        for timing in timings:
            speed, traffic = timing.speed(), timing.traffic(moments).median
            print(
                f"{kind:>8} {timing.threads:>8} {speed.median:>9.3f} {speed.low:>6.3f} "
                f"{speed.high:>6.3f} {traffic:>6.1f} {traffic / bandwidth:.0%}"
            )
        best = max(timings, key=lambda timing: timing.speed().median)
        write_record(
            name,
            {
                "row": f"AdamW on the CPU, {kind} moments, {best.threads} threads",
                "kernel": kernel_name(),
                "record_numel": NUMEL,
                "records": len(records),
                "bytes_per_parameter": BYTES[moments],
                "threads": best.threads,
                "repeats": arguments.repeats,
            },
            {
                "speed": best.speed(),
                "traffic": best.traffic(moments),
                **{f"speed_{timing.threads}_threads": timing.speed() for timing in timings},
            },
            Limit(
                bandwidth / BYTES[moments],
                "Gparam/s",
                f"host memory at {bandwidth:.1f} GB/s (parallel read-modify-write, reads "
                f"plus writes, measured in this run) over {BYTES[moments]} bytes per parameter",
            ),
            arguments.out,
        )
        del records  # before the next dtype allocates memory


if __name__ == "__main__":
    main()
