"""The C++ kernel for experts on the cores, `cpu_kernel.cpp`: loaded, and called with tensors.

`kernel_forward` and `kernel_backward` compute what they are given: `cpu` decides who takes what.

Shapes: R rows sorted by expert, D model.
"""

import contextlib
import ctypes
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overspill.core.experts import ExpertShape
from overspill.hardware.native import load_library

log = logging.getLogger("overspill")

BEST_ISA = -1
ISA_NAMES = ("generic", "avx2", "avx512", "amx")  # in cpu_kernel.cpp's order
_NO_RUNNER = (None, None, 0, None, None)


class Segment(NamedTuple):
    """One expert of a group: its flat record in host memory and its rows [start, stop)."""

    record: Tensor
    start: int
    stop: int


class Rows(NamedTuple):
    """The rows of a group in backward: two that are read, the weights, two that are written."""

    x_RD: Tensor
    dy_RD: Tensor
    row_weight_R: Tensor
    dx_RD: Tensor
    drow_weight_R: Tensor


def cpu_kernel_name() -> str:
    """What computes experts on the CPU: a name of ISA_NAMES, or "torch" without a compiler."""
    library = cpu_library()
    return "torch" if library is None else _best_isa_name(library)


def kernel_forward(
    x_RD: Tensor,
    y_RD: Tensor,
    segments: Sequence[Segment],
    shape: ExpertShape,
    threads: int,
    isa: int,
    later: tuple[Any, ...] | None = None,
) -> None:
    """Computes at once, or with `later`, a runner and the fields of its order, by that runner."""
    _check(x_RD, y_RD, segments, shape, threads)
    library = cpu_library()
    assert library is not None
    group = _group(segments, shape, x_RD.dtype)
    when = _later(later)
    library.overspill_experts_forward(*_base(x_RD), *_base(y_RD), *group, threads, isa, *when)


def kernel_backward(
    rows: Rows,
    segments: Sequence[Segment],
    shape: ExpertShape,
    threads: int,
    gradients: Sequence[Tensor] | None,
    isa: int,
    later: tuple[Any, ...] | None = None,
) -> list[float]:
    """The same for backward; the squares of the gradients are zeros without gradients."""
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
    library = cpu_library()
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


def read_bandwidth(tensor: Tensor, threads: int) -> float:
    """Bytes a second at which `threads` threads read `tensor`, the best of three passes.

    It measures memory only if the tensor is much larger than the caches: 1.5 GB or more.
    """
    library = cpu_library()
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


@contextlib.contextmanager
def delayed_tasks(every: int, seconds: float) -> Iterator[Callable[[], int]]:
    """For tests: of all threads' goes at tasks every so many takes longer, as if its core was lost
    to somebody else. What it gives tells how many were done again by others."""
    library = cpu_library()
    assert library is not None
    library.overspill_delay_tasks(every, int(seconds * 1e9))
    try:
        yield lambda: int(library.overspill_repeated_tasks())
    finally:
        library.overspill_delay_tasks(0, 0)


@functools.cache
def _best_isa_name(library: ctypes.CDLL) -> str:
    return str(library.overspill_cpu_isa().decode())


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """The compiled kernel with its signatures; None without a compiler, which is said once."""
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
    library.overspill_delay_tasks.argtypes = _types("nn")
    library.overspill_delay_tasks.restype = None
    library.overspill_allow_repeats.argtypes = _types("i")
    library.overspill_allow_repeats.restype = None
    library.overspill_repeated_tasks.argtypes = []
    library.overspill_repeated_tasks.restype = ctypes.c_int64
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


# temporary names
ExpertRows, BackwardRows = Segment, Rows


def cpu_isa() -> str | None:
    name = cpu_kernel_name()
    return None if name == "torch" else name


def max_kernel_rows(dtype: torch.dtype, backward: bool) -> int:
    from overspill.compute.cpu import most_rows

    return most_rows(dtype, cpu_kernel_name(), backward)


def why_unsupported(dtype: Any, shape: Any, activation: Any) -> str | None:
    return None
