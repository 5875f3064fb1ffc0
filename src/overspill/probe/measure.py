"""Measures the machine: link, memory and disk bandwidth, and matrix products."""

import itertools
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from overspill.compute.cpu_kernel import cpu_isa, read_bandwidth
from overspill.hardware.machine import disk_free
from overspill.hardware.profile import MachineProfile, Transfer
from overspill.probe.clock import (
    BackgroundCopies,
    Copies,
    Effort,
    Steps,
    copy_seconds,
    repeat,
    seconds_of,
)
from overspill.probe.memory import buffers, cold_bytes
from overspill.tiers.slab import Progress, device_slab
from overspill.tiers.ssd import RecordFile, check_folder
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import CopyStream

_SMALLEST_COPY = 64 << 10
_BATCH = 4 << 20  # several small copies are issued at a time, so that Python is not the limit
_SMALLEST_MATRIX = 256
_LONG_PRODUCT = 0.1
_DISK_BLOCK = 16 << 20
_DISK_WORKERS = 4  # as many as the engine has for each direction
_DISK_LIMITS = 30  # a disk needs so many times longer than other measurements


def measure_machine(
    device: torch.device,
    threads: int,
    disk: Path | None = None,
    progress: Progress | None = None,
    effort: Effort | None = None,
) -> MachineProfile:
    """Without a GPU, `device` is the CPU, and copies are those within host memory."""
    effort = effort or Effort()
    sizes = _copy_sizes(effort.largest_copy)
    steps = Steps(progress, len(sizes) + 1 + (device.type == "cuda") + (disk is not None))
    with torch_threads(threads), closing(_CopyBench(device, effort)) as copying:
        transfers = []
        for size in sizes:
            steps.begin(f"copies of {size >> 10} KiB")
            transfers.append(copying.transfer(size))
        steps.begin("host memory")
        host_read = copying.host_read(threads)
        matrix = None
        if device.type == "cuda":
            steps.begin("matrix products")
            matrix = matrix_rate(device, effort)
    ssd_read, ssd_write = None, None
    if disk is not None:
        steps.begin(f"the disk of {disk}")
        ssd_read, ssd_write = measure_disk(disk, effort)
    steps.end()
    return MachineProfile(
        cores=threads,
        kernel=cpu_isa() or "none",
        transfers=tuple(transfers),
        host_read=host_read,
        ssd_read=ssd_read,
        ssd_write=ssd_write,
        matrix=matrix,
    )


def _copy_sizes(largest: int) -> list[int]:
    sizes = itertools.takewhile(lambda s: s <= largest, (_SMALLEST_COPY << 2 * n for n in range(9)))
    return list(sizes) or [largest]


class _CopyBench:
    """Two halves of pinned memory, one to upload from and one to download to."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self._effort = effort
        size = effort.largest_copy
        cold = cold_bytes() if effort.cold is None else effort.cold
        count = 2 * max(1, cold // size // 2)
        self._uploaded, self._downloaded = device_slab(2, size, device)
        self._slab = buffers(count, size, pinned=device.type == "cuda")
        self._from, self._to = self._slab.slots.chunk(2)
        recorder = Recorder()
        self._up = CopyStream("upload", device, recorder, None)
        self._down = CopyStream("download", device, recorder, None)

    def close(self) -> None:
        self._slab.close()

    def transfer(self, size: int) -> Transfer:
        limit, moved = self._effort.seconds, _batch(size) * size
        (up,) = copy_seconds(limit, self._uploads(size))
        (down,) = copy_seconds(limit, self._downloads(size))
        up_both, down_both = copy_seconds(limit, self._uploads(size), self._downloads(size))
        return Transfer(size, moved / up, moved / down, moved / up_both, moved / down_both)

    def host_read(self, threads: int) -> float:
        flat = self._slab.slots.view(-1)
        rates = repeat(lambda: read_bandwidth(flat, threads), self._effort.seconds)
        return statistics.median(rates)

    def _uploads(self, size: int) -> BackgroundCopies:
        pieces, target = self._from.reshape(-1, size), self._uploaded[:size]
        return BackgroundCopies(self._up, _in_turn(lambda n: (target, pieces[n]), len(pieces)))

    def _downloads(self, size: int) -> BackgroundCopies:
        pieces, source = self._to.reshape(-1, size), self._downloaded[:size]
        return BackgroundCopies(self._down, _in_turn(lambda n: (pieces[n], source), len(pieces)))


def _in_turn(pair: Callable[[int], tuple[Tensor, Tensor]], pieces: int) -> Copies:
    batch = _batch(pair(0)[0].nbytes)
    return lambda number: [pair((number * batch + n) % pieces) for n in range(batch)]


def _batch(size: int) -> int:
    return max(1, _BATCH // size)


def matrix_rate(device: torch.device, effort: Effort) -> float:
    """The best rate over bf16 products of square matrices of growing size."""
    best, size = 0.0, min(_SMALLEST_MATRIX, effort.largest_matrix)
    while size <= effort.largest_matrix and _fits(size, device):
        a, b = torch.randn(2, size, size, device=device).to(torch.bfloat16)
        out = torch.empty_like(a)

        def product(a: Tensor = a, b: Tensor = b, out: Tensor = out) -> None:
            torch.mm(a, b, out=out)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        seconds = seconds_of(product, effort.seconds)
        best = max(best, 2 * size**3 / seconds)
        if seconds > _LONG_PRODUCT:
            break
        size *= 2
    return best


def _fits(size: int, device: torch.device) -> bool:
    """The smallest size is always measured."""
    if device.type != "cuda" or size <= _SMALLEST_MATRIX:
        return True
    return 16 * size**2 < torch.cuda.mem_get_info(device)[0] // 2


def measure_disk(folder: Path, effort: Effort | None = None) -> tuple[float, float]:
    """Bytes a second (read, write) with direct I/O, by as many workers as the engine has."""
    effort = effort or Effort()
    block = min(_DISK_BLOCK, effort.disk // _DISK_WORKERS)
    blocks = max(_DISK_WORKERS, min(effort.disk, disk_free(folder) // 4) // block)
    check_folder(folder, blocks * block)
    file = RecordFile(folder / f"probe-{uuid.uuid4().hex}", blocks, block)
    try:
        with closing(buffers(_DISK_WORKERS, block, pinned=False)) as slab:
            slab.slots.random_()  # some disks compress zeros
            limit = _DISK_LIMITS * effort.seconds
            written, write = _disk_rate(file.write, slab.slots, blocks, limit)
            # unwritten blocks would be read without disk access
            _, read = _disk_rate(file.read, slab.slots, written, limit)
    finally:
        file.close()
    return read, write


def _disk_rate(
    move: Callable[[int, Tensor], None], buffers: Tensor, blocks: int, limit: float
) -> tuple[int, float]:
    """How many blocks, from the first on, were moved within the time limit, and bytes a second."""
    began = time.perf_counter()
    turn = itertools.count()

    def work(buffer: Tensor) -> int:
        moved = 0
        # each worker moves at least one block; next() is atomic, so no block is moved twice
        while (block := next(turn)) < blocks:
            move(block, buffer)
            moved += 1
            if time.perf_counter() - began > limit:
                break
        return moved

    with ThreadPoolExecutor(len(buffers)) as workers:
        moved = sum(workers.map(work, buffers))
    return moved, moved * buffers.shape[1] / (time.perf_counter() - began)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Sets the number of threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
