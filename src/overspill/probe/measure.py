"""What the machine itself can do: its links, its memory, its disk, its matrix products."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from overspill.compute.cpu_kernel import cpu_kernel_name, read_bandwidth
from overspill.hardware.machine import disk_free
from overspill.hardware.profile import MachineProfile, Transfer
from overspill.probe.clock import (
    Copies,
    Effort,
    Flow,
    Steps,
    both_seconds,
    flow_seconds,
    repeat,
    seconds_of,
)
from overspill.probe.pool import Pool, cold_bytes
from overspill.tiers.slab import Progress, device_slab
from overspill.tiers.ssd import RecordFile, check_folder
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import CopyStream

_SMALLEST_COPY = 64 << 10
_BATCH = 4 << 20  # small copies are issued several at a time, or Python would be measured
_SMALLEST_MATRIX = 256
_LONG_PRODUCT = 0.1
_DISK_ROW = 16 << 20
_DISK_WORKERS = 4  # as many as the engine has for each direction
_DISK_SECONDS = 30  # boxes of time


def measure_machine(
    device: torch.device,
    threads: int,
    disk: Path | None = None,
    progress: Progress | None = None,
    effort: Effort | None = None,
) -> MachineProfile:
    """The limits that everything else is held against. Without a GPU, `device` is the CPU and
    copies are those within host memory that take their place."""
    effort = effort or Effort()
    sizes = _copy_sizes(effort.largest_copy)
    steps = Steps(progress, len(sizes) + 3 + (device.type == "cuda") + (disk is not None))
    with torch_threads(threads), closing(_Copying(device, effort)) as copying:
        transfers = []
        for size in sizes:
            steps.begin(f"copies of {size >> 10} KiB")
            transfers.append(copying.transfer(size))
        steps.begin("host memory")
        host_read = copying.host_read(threads)
        steps.begin("host memory beside uploads")
        read_beside, upload_beside = copying.host_read_beside(threads)
        steps.begin("matrix products on the CPU")
        matrix_cpu = matrix_rate(torch.device("cpu"), effort)
        matrix = None
        if device.type == "cuda":
            steps.begin("matrix products on the GPU")
            matrix = matrix_rate(device, effort)
    ssd_read, ssd_write = None, None
    if disk is not None:
        steps.begin(f"the disk of {disk}")
        ssd_read, ssd_write = measure_disk(disk, effort)
    steps.end()
    return MachineProfile(
        cores=threads,
        kernel=cpu_kernel_name(),
        transfers=tuple(transfers),
        host_read=host_read,
        host_read_beside=read_beside,
        upload_beside=upload_beside,
        ssd_read=ssd_read,
        ssd_write=ssd_write,
        matrix=matrix,
        matrix_cpu=matrix_cpu,
    )


def _copy_sizes(largest: int) -> list[int]:
    sizes = itertools.takewhile(lambda s: s <= largest, (_SMALLEST_COPY << 2 * n for n in range(9)))
    return list(sizes) or [largest]


class _Copying:
    """Two halves of pinned memory, one to upload from and one to download to."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self._effort = effort
        row = effort.largest_copy
        cold = cold_bytes() if effort.cold is None else effort.cold
        rows = 2 * max(1, cold // row // 2)
        self._uploaded, self._downloaded = device_slab(2, row, device)
        self._pool = Pool(rows, row, pinned=device.type == "cuda")
        self._from, self._to = self._pool.rows.chunk(2)
        recorder = Recorder()
        self._up = CopyStream("upload", device, recorder, None)
        self._down = CopyStream("download", device, recorder, None)

    def close(self) -> None:
        self._pool.close()

    def transfer(self, size: int) -> Transfer:
        box, moved = self._effort.seconds, _batch(size) * size
        up = moved / flow_seconds(self._uploads(size), box)
        down = moved / flow_seconds(self._downloads(size), box)
        both = both_seconds(self._uploads(size), self._downloads(size), box)
        return Transfer(size, up, down, moved / both[0], moved / both[1])

    def host_read(self, threads: int) -> float:
        return statistics.median(repeat(self._reader(threads), self._effort.seconds))

    def host_read_beside(self, threads: int) -> tuple[float, float]:
        """Bytes a second of the cores and of the uploads beside them."""
        size = self._effort.largest_copy
        with self._uploads(size) as uploads:
            rates = repeat(self._reader(threads), self._effort.seconds, uploads.enough)
        return statistics.median(rates), _batch(size) * size / uploads.seconds

    def _reader(self, threads: int) -> Callable[[], float]:
        flat = self._pool.rows.view(-1)
        return lambda: read_bandwidth(flat, threads)

    def _uploads(self, size: int) -> Flow:
        pieces = self._from.reshape(-1, size)
        return Flow(self._up, _in_turn(lambda n: (self._uploaded[:size], pieces[n]), len(pieces)))

    def _downloads(self, size: int) -> Flow:
        pieces = self._to.reshape(-1, size)
        return Flow(
            self._down, _in_turn(lambda n: (pieces[n], self._downloaded[:size]), len(pieces))
        )


def _in_turn(pair: Callable[[int], tuple[Tensor, Tensor]], pieces: int) -> Copies:
    batch = _batch(pair(0)[0].nbytes)
    return lambda number: [pair((number * batch + n) % pieces) for n in range(batch)]


def _batch(size: int) -> int:
    return max(1, _BATCH // size)


def matrix_rate(device: torch.device, effort: Effort) -> float:
    """The best rate of a bf16 product of square matrices that get larger, until one takes long."""
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
    """Never a reason to stop before the smallest: nothing would be known then."""
    if device.type != "cuda" or size <= _SMALLEST_MATRIX:
        return True
    return 16 * size**2 < torch.cuda.mem_get_info(device)[0] // 2


def measure_disk(folder: Path, effort: Effort | None = None) -> tuple[float, float]:
    """Bytes a second (read, written) past the cache, by as many workers as the engine has."""
    effort = effort or Effort()
    rows = max(_DISK_WORKERS, min(effort.disk, disk_free(folder) // 4) // _DISK_ROW)
    check_folder(folder, rows * _DISK_ROW)
    file = RecordFile(folder / f"probe-{os.getpid()}", rows, _DISK_ROW)
    try:
        with closing(Pool(_DISK_WORKERS, _DISK_ROW, pinned=False)) as pool:
            pool.rows.random_()  # some disks make zeros disappear
            box = _DISK_SECONDS * effort.seconds
            written, write = _disk_rate(file.write, pool.rows, rows, box)
            # only what was written: the rest of the file is known to be empty and never read
            _, read = _disk_rate(file.read, pool.rows, written, box)
    finally:
        file.close()
    return read, write


def _disk_rate(
    move: Callable[[int, Tensor], None], buffers: Tensor, rows: int, box: float
) -> tuple[int, float]:
    """How many rows, from the first on, were moved until the box was over, and bytes a second."""
    began = time.perf_counter()
    turn = itertools.count()

    def work(buffer: Tensor) -> int:
        moved = 0
        # every worker moves one at least; next() on a count is one step, so no row comes twice
        while (row := next(turn)) < rows:
            move(row, buffer)
            moved += 1
            if time.perf_counter() - began > box:
                break
        return moved

    with ThreadPoolExecutor(len(buffers)) as workers:
        moved = sum(workers.map(work, buffers))
    return moved, moved * buffers.shape[1] / (time.perf_counter() - began)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Torch's own products on so many cores as everything else."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
