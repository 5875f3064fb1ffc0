"""A native thread that computes groups of experts while the interpreter does something else.

Shapes: R rows sorted by expert, D model.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.compute.activation import Activation
from overspill.compute.cpu import kernel_takes, most_rows
from overspill.compute.cpu_kernel import (
    BEST_ISA,
    Rows,
    Segment,
    cpu_kernel_name,
    cpu_library,
    kernel_backward,
    kernel_forward,
)
from overspill.core.errors import EngineError
from overspill.core.experts import ExpertShape


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

    def __init__(self, inject: object = None) -> None:
        self._library = cpu_library()
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
        if name == "torch" or not kernel_takes(dtype, shape, activation):
            return False
        return max(rows) <= most_rows(dtype, name, backward)

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
        self._check(segments)
        kernel_forward(x_RD, y_RD, segments, shape, threads, BEST_ISA, (self._handle, *order))

    def backward(
        self,
        rows: Rows,
        segments: Sequence[Segment],
        shape: ExpertShape,
        threads: int,
        order: Order,
    ) -> None:
        """As `cpu_backward` without gradients of the weights. Routing weights are float32."""
        self._check(segments)
        for weights_R in (rows.row_weight_R, rows.drow_weight_R):
            assert weights_R.dtype == torch.float32
            assert weights_R.is_contiguous(), "a copy would be gone before it is used"
        kernel_backward(rows, segments, shape, threads, None, BEST_ISA, (self._handle, *order))

    def _check(self, segments: Sequence[Segment]) -> None:
        assert segments, "nothing to compute is done before its rows are there"
        if self._handle is None:
            raise EngineError("the CPU's experts were closed; load the model again")

    def wait(self, order: Order) -> bool:
        """Blocks until the order is done and nobody reads its rows and weights any more, as
        somebody may who was too slow; False if the runner was closed before."""
        if self._library is None or self._handle is None:
            return False
        return bool(self._library.overspill_runner_wait(self._handle, order.done, order.number))

    def check(self) -> None:
        pass

    def close(self) -> None:
        """Ends the thread, after the order that it is at. A forked child has none."""
        handle, self._handle = self._handle, None
        if handle is not None and self._library is not None and os.getpid() == self._process:
            self._library.overspill_runner_free(handle)


CpuRequest = Order
