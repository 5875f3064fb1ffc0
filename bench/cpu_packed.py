"""Speed of packed experts on the CPU: eight experts of W2 a request, none of them in the caches,
compared with the bandwidth of host memory in the same run; and how fast one core unpacks them.

PYTHONPATH=src python3 bench/cpu_packed.py --out bench/results
"""

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import Limit, metric, write_record
from torch import Tensor

from overspill.compute.cpu_kernel import ExpertRows, cpu_isa, read_bandwidth
from overspill.compute.packed_matrix import PackedMatrix, Parts
from overspill.compute.record_format import FormatBuilder, RecordFormat, stored_parts
from overspill.compute.runner import CpuRequest, Runner
from overspill.core.experts import ExpertShape
from overspill.core.packing import Kind, Scheme
from overspill.core.sizes import round_up
from overspill.hardware.machine import cpu_threads
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab

SHAPE = ExpertShape(2048, 768, gated=True)
EXPERTS = 8  # of a request
TOKENS = (1, 4)
CALLS = 24  # of one kind in a row
LEAD = 100e-6  # seconds between a request and its token rows
FORMATS: dict[str, tuple[Scheme, torch.dtype] | None] = {
    "MXFP4": (Scheme(Kind.E2M1, (1, 32)), torch.uint8),
    "NVFP4": (Scheme(Kind.E2M1, (1, 16)), torch.float8_e4m3fn),
    "int4, groups of 32": (Scheme(Kind.INTEGERS, (1, 32)), torch.bfloat16),
    "AWQ, groups of 128": (Scheme(Kind.INTEGERS, (1, 128)), torch.float16),
    "FP8, blocks of 128": (Scheme(Kind.E4M3, (128, 128), 8), torch.float32),
    "FP8, channels": (Scheme(Kind.E4M3, (1, None), 8), torch.bfloat16),
    "MXFP8": (Scheme(Kind.E4M3, (1, 32), 8), torch.uint8),
    "Q8_0": (Scheme(Kind.INT8, (1, 32), 8), torch.float16),
    "bf16": None,
}


def random_parts(scheme: Scheme, scales: torch.dtype, rows: int, columns: int) -> Parts:
    """A matrix with random codes, and scales that keep values near 0.02."""
    bits = 8 if scheme.kind in (Kind.E4M3, Kind.INT8) else 4
    codes = torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8)
    if scheme.kind is Kind.E4M3:
        codes = codes.where(codes & 127 != 127, 0).view(torch.float8_e4m3fn)
    elif scheme.kind is Kind.INTEGERS:
        codes = codes.view(torch.int32)
    elif scheme.kind is Kind.INT8:
        codes = codes.view(torch.int8)
    grid = -(-rows // (scheme.block[0] or rows)), -(-columns // (scheme.block[1] or columns))
    small = 118 if scales == torch.uint8 else 0.004
    stored = torch.full(grid, small, dtype=torch.float32).to(scales)
    factor, zeros = None, None
    if scales == torch.float8_e4m3fn:
        stored, factor = torch.ones(grid).to(scales), torch.tensor([0.004])
    if scales == torch.float16 and bits == 4:
        zeros = torch.randint(-4, 4, grid).to(torch.int8)
    return Parts(codes, stored, factor, zeros)


def random_record(name: str) -> tuple[RecordFormat | None, Tensor]:
    """The layout of the records of a format, and one of them as bytes."""
    torch.manual_seed(0)
    packing = FORMATS[name]
    if packing is None:
        plain = torch.empty(SHAPE.numel, dtype=torch.bfloat16).normal_(0, 0.02)
        return None, plain.view(torch.uint8)
    hidden, model = SHAPE.d_hidden, SHAPE.d_model
    builder, made = FormatBuilder(SHAPE), []
    for tensor, rows, columns in ((0, hidden, model), (0, hidden, model), (1, model, hidden)):
        parts = stored_parts(random_parts(*packing, rows, columns))
        builder.add(tensor, rows, PackedMatrix(packing[0], rows, columns), parts)
        made.append(parts)
    format = builder.build()
    record = torch.zeros(format.nbytes, dtype=torch.uint8)
    for piece, parts in zip(format.pieces, made, strict=True):
        for field, part in parts.items():
            piece.stored[field].of(record).copy_(part)
    return format, record


class Records:
    """Copies of a record in host memory, used in rotation: the others evict them from the caches
    before their next use."""

    def __init__(self, memory: Tensor, name: str) -> None:
        self.format, record = random_record(name)
        self.nbytes = record.numel()
        each = round_up(self.nbytes, ALIGN)
        count = memory.numel() // each
        all_records = memory[: count * each].view(count, each)[:, : self.nbytes]
        for memory_of_one in all_records:
            memory_of_one.copy_(record)
        if self.format is None:
            all_records = all_records.view(torch.bfloat16)
        self._next: Iterator[Tensor] = itertools.cycle(all_records)

    def take(self, count: int) -> list[Tensor]:
        return list(itertools.islice(self._next, count))

    def unpack_rate(self) -> float | None:
        """Weights a second that one thread unpacks to bf16."""
        if self.format is None:
            return None
        out, times = torch.empty(SHAPE.numel, dtype=torch.bfloat16), []
        for record in self.take(6):
            start = time.perf_counter()
            self.format.unpack(record, out)
            times.append(time.perf_counter() - start)
        return SHAPE.numel / min(times)


class Requests:
    """Computes with a runner, as the engine does: the request precedes its token rows."""

    def __init__(self, threads: int, calls: int = CALLS) -> None:
        self.threads = threads
        self._calls = calls
        self._runner = Runner()
        self._flags = torch.zeros(32, dtype=torch.int32)  # two flags, in separate cache lines
        self._number = 0

    def seconds(self, records: Records, tokens: int) -> float:
        """The median time of some requests, each from the moment when its rows are ready."""
        return statistics.median(self._once(records, tokens) for _ in range(self._calls))

    def _once(self, records: Records, tokens: int) -> float:
        x = torch.randn(EXPERTS * tokens, SHAPE.d_model).to(torch.bfloat16)
        y = torch.empty_like(x)
        rows = enumerate(records.take(EXPERTS))
        experts = [ExpertRows(record, tokens * i, tokens * (i + 1)) for i, record in rows]
        self._number += 1
        ready, done = self._flags[0].data_ptr(), self._flags[16].data_ptr()
        request = CpuRequest(ready, done, self._number, (ctypes.c_int64 * 2)())
        given = experts, SHAPE, self.threads, request, None, records.format
        self._runner.forward(x, y, *given)
        until = time.perf_counter() + LEAD
        while time.perf_counter() < until:
            pass
        self._flags[0] = self._number
        self._runner.wait(request)
        assert bool(y.isfinite().all())
        begin, end = request.times
        return (end - begin) / 1e9

    def close(self) -> None:
        self._runner.close()


class Measured(NamedTuple):
    """Times of a format with a number of tokens of each expert."""

    name: str
    tokens: int
    nbytes: int
    seconds: list[float]
    """Seconds of a request, for each repeat."""
    unpacked: float | None


def measure(memory: Tensor, requests: Requests, repeats: int) -> Iterator[Measured]:
    for name in FORMATS:
        records = Records(memory, name)
        rate = records.unpack_rate()
        for tokens in TOKENS:
            requests.seconds(records, tokens)  # starts threads
            times = [requests.seconds(records, tokens) for _ in range(repeats)]
            yield Measured(name, tokens, EXPERTS * records.nbytes, times, rate)


def row(measured: Measured, plain: float, bandwidth: float) -> dict[str, Any]:
    """One row of the table; `plain` are the seconds of a request in bf16."""
    seconds, rate = statistics.median(measured.seconds), measured.unpacked
    return {
        "format": measured.name,
        "tokens of each": measured.tokens,
        "request": f"{seconds * 1e6:.0f} µs",
        "read": f"{measured.nbytes / seconds / 1e9:.1f} GB/s",
        "of host bandwidth": f"{measured.nbytes / seconds / bandwidth:.0%}",
        "of bf16": f"{plain / seconds:.2f}×",
        "unpacked by one core": "" if rate is None else f"{rate / 1e9:.1f} G weights/s",
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=cpu_threads(None))
    parser.add_argument("--gb", type=float, default=1.0, help="weights to rotate over")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a quick run of everything")
    parser.add_argument("--out", type=Path, help="folder for the JSON record")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    threads, repeats = arguments.threads, 1 if arguments.smoke else arguments.repeats
    size = int((0.1 if arguments.smoke else arguments.gb) * 1e9)
    slab = HostSlab("experts", 1, round_up(size, ALIGN), torch.cuda.is_available())
    memory = slab[0]
    memory.zero_()
    requests = Requests(threads, 2 if arguments.smoke else CALLS)
    # Before and after, and the best counts: other processes can only lower it.
    bandwidths = [read_bandwidth(memory, threads)]
    found = list(measure(memory, requests, repeats))
    bandwidths.append(read_bandwidth(memory, threads))
    requests.close()
    bandwidth = max(bandwidths)
    print(f"kernel {cpu_isa()}, {threads} threads, reading at {bandwidth / 1e9:.1f} GB/s")
    rows, shares = [], {}
    for each in found:
        plain = next(m for m in found if m.name == "bf16" and m.tokens == each.tokens)
        rows.append(row(each, statistics.median(plain.seconds), bandwidth))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
        values = [each.nbytes / seconds / bandwidth for seconds in each.seconds]
        shares[f"{each.name}, {each.tokens} tokens"] = metric(values, "share")
    write_record(
        "cpu-packed",
        {
            "row": f"8 experts of 2048×768 a request on the CPU, packed, {threads} threads",
            "kernel": cpu_isa(),
            "threads": threads,
            "gb": size / 1e9,
            "repeats": repeats,
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
    slab.close()


if __name__ == "__main__":
    main()
