"""Experts that stay in host memory and compute on the cores.

One call computes a group: some experts of a layer, each with its rows. Rows and results are host
tensors, weights are read where they lie, and the gradient of an expert is written as a record, just
where the optimizer wants it.

Few rows go through the C++ kernel, which takes little longer than the reading of the weights. Many
rows are bound by arithmetic, and torch takes over where it is faster. Torch also does what the
kernel does not: biases, transposed weights, other activations, or everything without a compiler.

Shapes: R rows sorted by expert, D model, H hidden.
"""

import ctypes
import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overspill.compute.activation import Activation, Fused
from overspill.compute.experts import wave_backward, wave_forward
from overspill.core.experts import ExpertShape
from overspill.hardware.native import load_library

log = logging.getLogger("overspill")

BEST_ISA = -1
ISA_NAMES = ("generic", "avx2", "avx512", "amx")  # in cpu_kernel.cpp's order

# Up to how many rows of an expert the kernel computes: (forward, backward). Measured against torch
# held to the same instructions, call by call on one core, for 1024×4096 and gated 2048×768: here
# the kernel is level with torch, below it is faster. With bf16 and neither AVX-512 nor AMX it is
# 3 to 40 times faster at 64 rows and the ratio does not fall with more; there the scratch sets the
# limit. Constants, because a choice by the clock would make results depend on it.
_MOST_ROWS = {
    torch.bfloat16: {
        "generic": (512, 512),
        "avx2": (512, 512),
        "avx512": (64, 32),
        "amx": (256, 512),
    },
    torch.float32: {
        "generic": (16, 16),
        "avx2": (8, 8),
        "avx512": (16, 16),
        "amx": (16, 16),
    },
}


class Segment(NamedTuple):
    """One expert of a group: its flat record in host memory and its rows [start, stop)."""

    record: Tensor
    start: int
    stop: int


def cpu_forward(
    x_RD: Tensor,
    y_RD: Tensor,
    segments: Sequence[Segment],
    shape: ExpertShape,
    activation: Activation | None,
    threads: int,
    isa: int = BEST_ISA,
) -> None:
    """Writes the output of every segment's rows into `y_RD`; routing weights are not applied.

    Results are rounded where those of the GPU are: after each product and after the activation.
    `isa` forces an index of ISA_NAMES in tests, and then the kernel computes any number of rows.
    """
    native, rest = _divide(x_RD, segments, shape, activation, isa, backward=False)
    if native:
        _forward_native(x_RD, y_RD, [segments[i] for i in native], shape, threads, isa)
    for number in rest:
        record, start, stop = segments[number]
        rows = slice(start, stop)
        ends = torch.tensor([stop - start], dtype=torch.int32)
        args = (x_RD[rows], record.unsqueeze(0), shape, ends, [stop - start], activation)
        y_RD[rows] = wave_forward(*args)[0]


def cpu_backward(
    x_RD: Tensor,
    dy_RD: Tensor,
    row_weight_R: Tensor,
    dx_RD: Tensor,
    drow_weight_R: Tensor,
    segments: Sequence[Segment],
    shape: ExpertShape,
    activation: Activation | None,
    threads: int,
    gradients: Sequence[Tensor] | None = None,
    isa: int = BEST_ISA,
) -> list[float]:
    """The gradients of sum(row_weight * y * dy), as `wave_backward` gives them: into `dx_RD` and
    `drow_weight_R`, and with `gradients` (a flat record for each segment, of the weights' dtype)
    those of the weights. Returns the sum of squares of each of these; nothing without them."""
    native, rest = _divide(x_RD, segments, shape, activation, isa, backward=True)
    squares = [0.0] * len(segments)
    if native:
        own = None if gradients is None else [gradients[i] for i in native]
        rows = _Rows(x_RD, dy_RD, row_weight_R, dx_RD, drow_weight_R)
        some = _backward_native(rows, [segments[i] for i in native], shape, threads, own, isa)
        for number, square in zip(native, some, strict=True):
            squares[number] = square
    for number in rest:
        into = None if gradients is None else gradients[number]
        rows = _Rows(x_RD, dy_RD, row_weight_R, dx_RD, drow_weight_R)
        squares[number] = _backward_torch(rows, segments[number], shape, activation, into)
    return [] if gradients is None else squares


class Order(NamedTuple):
    """When a `Runner` begins, and how it tells that it has ended. Both flags are 32-bit numbers in
    memory, and so may be written and awaited by a GPU; they count up and go round."""

    there: int
    """Address of the flag that comes up to `number` when the rows are there."""
    done: int
    """Address of the flag that comes up to it when they are computed."""
    number: int
    times: ctypes.Array[ctypes.c_int64]
    """Begin and end, of time.perf_counter_ns; both zero until then."""


class Runner:
    """A thread that computes groups of experts one after another, each as soon as its rows are
    there, and never needs the interpreter."""

    def __init__(self) -> None:
        self._library = _library()
        assert self._library is not None
        self._handle: int | None = self._library.overspill_runner_new()
        self._process = os.getpid()

    @staticmethod
    def takes(
        rows: Sequence[int],
        dtype: torch.dtype,
        shape: ExpertShape,
        activation: Activation | None,
        backward: bool,
    ) -> bool:
        """Whether the kernel computes experts with so many rows each, all of them."""
        name = cpu_kernel_name()
        if name == "torch" or not _kernel_takes(dtype, shape, activation):
            return False
        return max(rows) <= _most_rows(dtype, name, backward)

    def forward(
        self,
        x_RD: Tensor,
        y_RD: Tensor,
        segments: Sequence[Segment],
        shape: ExpertShape,
        threads: int,
        order: Order,
    ) -> None:
        """As `cpu_forward`, when the rows are there; returns at once."""
        _forward_native(x_RD, y_RD, segments, shape, threads, BEST_ISA, (self._handle, *order))

    def backward(
        self,
        x_RD: Tensor,
        dy_RD: Tensor,
        row_weight_R: Tensor,
        dx_RD: Tensor,
        drow_weight_R: Tensor,
        segments: Sequence[Segment],
        shape: ExpertShape,
        threads: int,
        order: Order,
    ) -> None:
        """As `cpu_backward` without gradients of the weights. Routing weights are float32."""
        assert row_weight_R.dtype == drow_weight_R.dtype == torch.float32
        rows = _Rows(x_RD, dy_RD, row_weight_R, dx_RD, drow_weight_R)
        _backward_native(rows, segments, shape, threads, None, BEST_ISA, (self._handle, *order))

    def wait(self, order: Order) -> bool:
        """Blocks until the order is done; False if the runner was closed before."""
        if self._library is None or self._handle is None:
            return False
        return bool(self._library.overspill_runner_wait(self._handle, order.done, order.number))

    def close(self) -> None:
        """Ends the thread, after the order that it is at. A forked child has none."""
        handle, self._handle = self._handle, None
        if handle is not None and self._library is not None and os.getpid() == self._process:
            self._library.overspill_runner_free(handle)


_NO_RUNNER = (None, None, 0, None, None)


def cpu_kernel_name() -> str:
    """What computes experts on the CPU: a name of ISA_NAMES, or "torch" without a compiler."""
    library = _library()
    return "torch" if library is None else _best_isa_name(library)


def read_bandwidth(tensor: Tensor, threads: int) -> float:
    """Bytes a second at which `threads` threads read `tensor`, the best of three passes.

    It measures memory only if the tensor is much larger than the caches: 1.5 GB or more.
    """
    library = _library()
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    best = float("inf")
    for _ in range(4):  # the first one starts the threads
        start = time.perf_counter()
        if library is None:
            flat[: flat.numel() // 8 * 8].view(torch.int64).sum()
        else:
            library.overspill_read(flat.data_ptr(), flat.numel(), threads)
        best = min(best, time.perf_counter() - start)
    return flat.numel() / best


class _Rows(NamedTuple):
    """The rows of a group in backward: two that are read, the weights, two that are written."""

    x_RD: Tensor
    dy_RD: Tensor
    row_weight_R: Tensor
    dx_RD: Tensor
    drow_weight_R: Tensor


def _divide(
    x_RD: Tensor,
    segments: Sequence[Segment],
    shape: ExpertShape,
    activation: Activation | None,
    isa: int,
    backward: bool,
) -> tuple[list[int], list[int]]:
    """Which segments the kernel computes, and which torch."""
    numbers = list(range(len(segments)))
    name = cpu_kernel_name()
    if name == "torch" or not _kernel_takes(x_RD.dtype, shape, activation):
        return [], numbers
    assert BEST_ISA <= isa <= ISA_NAMES.index(name)
    if isa != BEST_ISA:
        return numbers, []
    most = _most_rows(x_RD.dtype, name, backward)
    many = [i for i in numbers if segments[i].stop - segments[i].start > most]
    return [i for i in numbers if i not in many], many


def _most_rows(dtype: torch.dtype, isa: str, backward: bool) -> int:
    return _MOST_ROWS[dtype][isa][backward]


def _kernel_takes(dtype: torch.dtype, shape: ExpertShape, activation: Activation | None) -> bool:
    """Whether the kernel computes such experts; says once for each reason if it does not."""
    plain = activation is None or isinstance(activation, Fused)
    why = [
        f"{dtype}" if dtype not in (torch.bfloat16, torch.float32) else "",
        "biases" if shape.bias else "",
        "transposed weights" if shape.transposed else "",
        "" if plain else "activations other than GELU and gated SiLU",
    ]
    reasons = ", ".join(reason for reason in why if reason)
    if reasons:
        _say_torch(reasons)
    return not reasons


@functools.cache
def _say_torch(reasons: str) -> None:
    log.warning("CPU experts: the native kernel has no %s, torch operations take over", reasons)


def _forward_native(
    x_RD: Tensor,
    y_RD: Tensor,
    segments: Sequence[Segment],
    shape: ExpertShape,
    threads: int,
    isa: int,
    later: tuple[Any, ...] | None = None,
) -> None:
    _check(x_RD, y_RD, segments, shape, threads)
    library = _library()
    assert library is not None
    group = _group(segments, shape, x_RD.dtype)
    when = _later(later)
    library.overspill_experts_forward(*_base(x_RD), *_base(y_RD), *group, threads, isa, *when)


def _backward_native(
    rows: _Rows,
    segments: Sequence[Segment],
    shape: ExpertShape,
    threads: int,
    gradients: Sequence[Tensor] | None,
    isa: int,
    later: tuple[Any, ...] | None = None,
) -> list[float]:
    x_RD, dy_RD, row_weight_R, dx_RD, drow_weight_R = rows
    _check(x_RD, dx_RD, segments, shape, threads)
    _check(x_RD, dy_RD, segments, shape, threads)
    for gradient in gradients or ():
        assert gradient.dtype == x_RD.dtype
        assert gradient.is_contiguous()
        assert gradient.numel() == shape.numel
    weight_R = row_weight_R.to(torch.float32).contiguous()
    direct = drow_weight_R.dtype == torch.float32 and drow_weight_R.is_contiguous()
    dweight_R = drow_weight_R if direct else torch.empty_like(weight_R)
    squares = (ctypes.c_double * len(segments))()
    library = _library()
    assert library is not None
    library.overspill_experts_backward(
        *_base(x_RD),
        *_base(dy_RD),
        weight_R.data_ptr(),
        *_base(dx_RD),
        dweight_R.data_ptr(),
        *_group(segments, shape, x_RD.dtype),
        None if gradients is None else _pointers(gradients),
        squares,
        threads,
        isa,
        *_later(later),
    )
    if not direct:
        for _, start, stop in segments:
            drow_weight_R[start:stop] = dweight_R[start:stop]
    return list(squares)


def _backward_torch(
    rows: _Rows,
    segment: Segment,
    shape: ExpertShape,
    activation: Activation | None,
    gradient: Tensor | None,
) -> float:
    record, start, stop = segment
    own = slice(start, stop)
    grads = wave_backward(
        rows.x_RD[own],
        rows.dy_RD[own],
        rows.row_weight_R[own],
        record.unsqueeze(0),
        shape,
        torch.tensor([stop - start], dtype=torch.int32),
        [stop - start],
        need_dw=gradient is not None,
        activation=activation,
    )
    rows.dx_RD[own] = grads.dx_RD
    rows.drow_weight_R[own] = grads.drow_weight_R
    if gradient is None:
        return 0.0
    torch.cat([part.flatten() for part in grads.dw], out=gradient)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return float(torch.linalg.vector_norm(gradient, dtype=wide).square())


def _check(
    x_RD: Tensor, other_RD: Tensor, segments: Sequence[Segment], shape: ExpertShape, threads: int
) -> None:
    assert threads >= 1
    for rows in (x_RD, other_RD):
        assert rows.dtype == x_RD.dtype
        assert rows.device.type == "cpu"
        assert rows.shape == (x_RD.shape[0], shape.d_model)
        assert rows.stride(1) == 1 or shape.d_model == 1
    for record, start, stop in segments:
        assert record.dtype == x_RD.dtype
        assert record.device.type == "cpu"
        assert record.is_contiguous()
        assert record.numel() >= shape.numel
        assert 0 <= start <= stop <= x_RD.shape[0]


def _base(rows: Tensor) -> tuple[int, int]:
    return rows.data_ptr(), rows.stride(0)


def _group(
    segments: Sequence[Segment], shape: ExpertShape, dtype: torch.dtype
) -> tuple[object, ...]:
    """The arguments that describe a group and its experts."""
    numbers = ctypes.c_int64 * len(segments)
    return (
        _pointers([segment.record for segment in segments]),
        numbers(*(segment.start for segment in segments)),
        numbers(*(segment.stop for segment in segments)),
        len(segments),
        shape.d_model,
        shape.d_hidden,
        shape.gated,
        dtype == torch.bfloat16,
    )


def _later(later: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """The arguments for a runner: (runner, there, number, done, times)."""
    if later is None:
        return _NO_RUNNER
    runner, there, done, number, times = later
    return runner, there, number, done, times


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@functools.cache
def _best_isa_name(library: ctypes.CDLL) -> str:
    return str(library.overspill_cpu_isa().decode())


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_name("cpu_kernel.cpp"), "cpu-experts")
    if library is None:
        log.warning("CPU experts run as torch operations, several times slower for few tokens")
        return None
    library.overspill_cpu_isa.argtypes = []
    library.overspill_cpu_isa.restype = ctypes.c_char_p
    rows, group = "pn", "pppnnnii"
    later = "ppupp"
    library.overspill_experts_forward.argtypes = _types(rows + rows + group + "ii" + later)
    library.overspill_experts_forward.restype = None
    backward = rows + rows + "p" + rows + "p" + group + "ppii" + later
    library.overspill_experts_backward.argtypes = _types(backward)
    library.overspill_experts_backward.restype = None
    library.overspill_runner_new.argtypes = []
    library.overspill_runner_new.restype = ctypes.c_void_p
    library.overspill_runner_free.argtypes = _types("p")
    library.overspill_runner_free.restype = None
    library.overspill_runner_wait.argtypes = _types("ppu")
    library.overspill_runner_wait.restype = ctypes.c_int
    library.overspill_read.argtypes = _types("pni")
    library.overspill_read.restype = ctypes.c_uint64
    return library


def _types(letters: str) -> list[Any]:
    """p: a pointer, n: a size, i: an int, u: one without a sign."""
    kinds = {
        "p": ctypes.c_void_p,
        "n": ctypes.c_int64,
        "i": ctypes.c_int,
        "u": ctypes.c_uint32,
    }
    return [kinds[letter] for letter in letters]
