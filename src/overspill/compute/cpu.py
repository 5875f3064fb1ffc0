"""Experts that stay in host memory and compute on the cores.

One call computes a group: some experts of a layer, each with its rows. Rows and results are host
tensors, weights are read where they lie, and the gradient of an expert is written as a record, just
where the optimizer wants it.

Few rows go through the C++ kernel, which takes little longer than the reading of the weights. Many
rows are bound by arithmetic, and torch takes over where it is faster. Torch also does what the
kernel does not: biases, transposed weights, other activations, or everything without a compiler.

Shapes: R rows sorted by expert, D model, H hidden.
"""

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.compute.activation import Activation, Fused
from overspill.compute.cpu_kernel import (
    BEST_ISA,
    ISA_NAMES,
    Rows,
    Segment,
    cpu_kernel_name,
    kernel_backward,
    kernel_forward,
)
from overspill.compute.experts import wave_backward, wave_forward
from overspill.core.experts import ExpertShape

log = logging.getLogger("overspill")

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
        kernel_forward(x_RD, y_RD, [segments[i] for i in native], shape, threads, isa)
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
        rows = Rows(x_RD, dy_RD, row_weight_R, dx_RD, drow_weight_R)
        some = kernel_backward(rows, [segments[i] for i in native], shape, threads, own, isa)
        for number, square in zip(native, some, strict=True):
            squares[number] = square
    for number in rest:
        into = None if gradients is None else gradients[number]
        rows = Rows(x_RD, dy_RD, row_weight_R, dx_RD, drow_weight_R)
        squares[number] = _backward_torch(rows, segments[number], shape, activation, into)
    return [] if gradients is None else squares


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
    if name == "torch" or not kernel_takes(x_RD.dtype, shape, activation):
        return [], numbers
    assert BEST_ISA <= isa <= ISA_NAMES.index(name)
    if isa != BEST_ISA:
        return numbers, []
    most = most_rows(x_RD.dtype, name, backward)
    many = [i for i in numbers if segments[i].stop - segments[i].start > most]
    return [i for i in numbers if i not in many], many


def most_rows(dtype: torch.dtype, isa: str, backward: bool) -> int:
    """Up to how many rows of an expert the kernel computes."""
    return _MOST_ROWS[dtype][isa][backward]


def kernel_takes(dtype: torch.dtype, shape: ExpertShape, activation: Activation | None) -> bool:
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
    log.info("CPU experts: the native kernel has no %s, torch operations take over", reasons)


def _backward_torch(
    rows: Rows,
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
