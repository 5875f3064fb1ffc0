# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Requests to the CPU, which computes experts that are not on the device, and its results."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.decode import constants
from overspill.compute.decode.launch import after, early, power
from overspill.compute.misses import MissBuffers


class CpuRows(NamedTuple):
    """Rows that the CPU computes, float32 in pinned memory. A row is valid if its `missed_B` is not
    0, once `done` is 1."""

    out_BD: Tensor
    missed_B: Tensor
    done: Tensor

    def prepare(self) -> int:
        """Return how a kernel that adds these rows waits: 1 if it waits at each row. With several
        rows another kernel waits first, and 2 is returned, because each look at the flag is a read
        over the link, which delays others."""
        n_rows = len(self.missed_B)
        if n_rows < constants.SEVERAL:
            return 1
        _wait_kernel[(1,)](
            self.missed_B, self.done, n_rows, power(n_rows), self.missed_B.is_cuda, num_warps=1,
            **early(self.missed_B.device),
        )  # fmt: skip
        return 2


class MissRequest(NamedTuple):
    """Flags that tell the CPU that a list of misses is complete, if there are misses: `done`
    becomes 0, then `ready` 1."""

    ready: Tensor
    done: Tensor
    missed_B: Tensor


class RequestArguments(NamedTuple):
    """Arguments of a kernel for `send_request`."""

    values: tuple[Tensor, Tensor, Tensor, int]  # ready, done, missed, n_rows
    constants: tuple[int, bool]  # REQUEST, ON_GPU


def request_arguments(request: MissRequest | None, offsets_BK: Tensor) -> RequestArguments:
    """Return the arguments for a batch with these experts. Without a request, the kernel uses no
    memory."""
    n_rows, on_gpu = len(offsets_BK), offsets_BK.is_cuda
    if request is None:
        return RequestArguments((offsets_BK, offsets_BK, offsets_BK, n_rows), (0, on_gpu))
    return RequestArguments((*request, n_rows), (power(n_rows), on_gpu))


def hint(
    ids_BK: Tensor, real_B: Tensor | None, table_E: Tensor, layer: int, misses: MissBuffers
) -> None:
    """Tells the CPU which experts of a later layer are not on the device. Nothing waits for this
    hint, and the CPU may find it incomplete. All rows count if `real_B` is None."""
    n_rows, top_k = ids_BK.shape
    count = n_rows * top_k
    assert count <= len(misses.ahead_N)
    _hint_kernel[(1,)](
        ids_BK, ids_BK if real_B is None else real_B, table_E, misses.ahead_N, misses.ahead_count,
        count, layer * len(table_E), top_k, power(count), real_B is not None, num_warps=1,
        **early(ids_BK.device),
    )  # fmt: skip


@triton.jit
def _hint_kernel(
    ids, is_real, table, ahead, ahead_count, count, first, TOP_K: tl.constexpr, SIZE: tl.constexpr,
    REAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after(EARLY)
    at = tl.arange(0, SIZE)
    used = at < count
    if REAL:
        used = used & (tl.load(is_real + at // TOP_K, mask=used, other=0) != 0)
    chosen = tl.load(ids + at, mask=used, other=0)
    absent = used & (tl.load(table + chosen, mask=used, other=0) == -(1 << 62))
    tl.store(ahead + at, tl.where(absent, first + chosen, -1), mask=at < count)
    tl.debug_barrier()
    tl.store(ahead_count, count)


@triton.jit
def _fence(ON_GPU: tl.constexpr):
    """Orders reads and writes of memory that the CPU uses too."""
    if ON_GPU:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def send_request(ready, done, missed, n_rows, REQUEST: tl.constexpr, ON_GPU: tl.constexpr):
    """Raises the flag of a request in one program of a kernel, after the kernel that has written
    the list."""
    if REQUEST > 0:  # noqa: SIM102, known to the compiler
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            rows = tl.arange(0, REQUEST)
            if tl.sum(tl.load(missed + rows, mask=rows < n_rows, other=0), 0) > 0:
                tl.store(done, 0)
                _fence(ON_GPU)
                tl.store(ready, 1)


@triton.jit
def await_cpu(done, count, ON_GPU: tl.constexpr):
    """Waits until the CPU has computed the misses, unless `count` is 0."""
    if count > 0:
        seen = tl.load(done, volatile=True)
        while seen == 0:
            if ON_GPU:
                tl.inline_asm_elementwise(
                    "nanosleep.u32 $1; mov.b32 $0, $1;", "=r,r", [64 * tl.num_programs(0)],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
            seen = tl.load(done, volatile=True)
        _fence(ON_GPU)


@triton.jit
def _wait_kernel(
    missed, done, n_rows, ROWS: tl.constexpr, ON_GPU: tl.constexpr, EARLY: tl.constexpr
):
    after(EARLY)
    rows = tl.arange(0, ROWS)
    count = tl.sum(tl.load(missed + rows, mask=rows < n_rows, other=0), 0)
    await_cpu(done, count, ON_GPU)


def add_cpu_rows(y_BD: Tensor, host: CpuRows) -> None:
    """Adds the results of the CPU to float32 rows, in place."""
    n_rows, width = y_BD.shape
    _add_rows_kernel[(n_rows,)](
        y_BD, *host, width, host.prepare(), power(width), y_BD.is_cuda, num_warps=4,
        **early(y_BD.device),
    )  # fmt: skip


@triton.jit
def _add_rows_kernel(
    y, host, missed, done, width, HOST: tl.constexpr, BLOCK: tl.constexpr, ON_GPU: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after(EARLY)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    count = tl.load(missed + row)
    if HOST == 1:
        await_cpu(done, count, ON_GPU)
    at = row * width + columns
    own = (columns < width) & (count > 0)
    total = tl.load(y + at, mask=own, other=0.0)
    total += tl.load(host + at, mask=own, other=0.0)
    tl.store(y + at, total, mask=own)
