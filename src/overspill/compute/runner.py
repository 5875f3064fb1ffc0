"""A native thread that computes groups of experts while the interpreter does something else.

Shapes: R token rows sorted by expert, D model.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from overspill.compute.activation_form import Form
from overspill.compute.cpu_kernel import (
    BackwardRows,
    ExpertRows,
    GroupArgs,
    PackedFormat,
    WeightGradient,
    group_args,
    inject_callback,
    loaded_library,
    raise_first,
)
from overspill.core.errors import EngineError
from overspill.core.experts import ExpertShape
from overspill.tiers.worker_sync import WorkerSync

_DONE, _TIMED_OUT = 0, -1  # as in cpu_runner.h
_SLICE = 0.1  # seconds of a native wait: between two of them Ctrl-C takes effect


class CpuRequest(NamedTuple):
    """Flags by which a `Runner` starts a group and signals its end. Both flags are 32-bit numbers
    in memory, so a GPU can write and await them; they count up and wrap around."""

    ready: int
    """Address of the flag that reaches `number` when the token rows are ready."""
    done: int
    """Address of the flag that reaches `number` when the results are complete."""
    number: int
    times: "ctypes.Array[ctypes.c_int64]"
    """Begin and end, as time.perf_counter_ns(); both zero until then. The end is written last."""


class Runner:
    """Thread that computes groups of experts one after another, each as soon as its token rows are
    ready. It does not need the GIL.

    `inject("cpu")` is for fault-injection tests. Native threads call it at the start of each
    request and before each task; it may sleep. An exception that it raises is stored: the request
    is completed, because a GPU may wait for its flag, and the next call of a method raises it.
    """

    def __init__(
        self, inject: Callable[[str], object] | None = None, sync: WorkerSync | None = None
    ) -> None:
        """`sync` has the watchdog of waits."""
        self._library = loaded_library()
        self._sync = sync or WorkerSync()
        self._failures: list[BaseException] = []
        # Kept here: the native threads call it until close().
        self._callback = inject_callback(inject, self._failures)
        self._process = os.getpid()
        self._closed = False
        self._handle: int = self._library.overspill_runner_new()

    def forward(
        self,
        x_RD: Tensor,
        y_RD: Tensor,
        experts: Sequence[ExpertRows],
        shape: ExpertShape,
        threads: int,
        request: CpuRequest,
        form: Form | None = None,
        format: PackedFormat | None = None,
    ) -> None:
        """Submit `kernel_forward`, which runs once the rows are ready. The caller keeps the tensors
        until the request is done."""
        args = group_args(x_RD, y_RD, experts, shape, threads, form=form, format=format)
        self._submit(args, request)

    def backward(
        self,
        rows: BackwardRows,
        experts: Sequence[ExpertRows],
        shape: ExpertShape,
        threads: int,
        request: CpuRequest,
        form: Form | None = None,
        gradients: Sequence[WeightGradient] = (),
    ) -> None:
        """Submit `kernel_backward`, which runs once the rows are ready."""
        tensors = rows.x_RD, rows.dx_RD
        args = group_args(
            *tensors, experts, shape, threads, backward=rows, form=form, gradients=gradients
        )
        self._submit(args, request)

    def check(self) -> None:
        """Raise the stored exception of `inject`, once."""
        raise_first(self._failures)

    def wait(self, request: CpuRequest) -> bool:
        """Block until the request is done; return False if the runner was closed before. Raises if
        a worker thread has failed, or if no task has been computed for too long."""
        ended = self.wait_end(request)
        self.check()
        return ended

    def wait_end(self, request: CpuRequest) -> bool:
        """Wait like `wait`, but leave an exception of `inject` to the next call of another
        method."""
        what = "the results of CPU experts (runner thread, once the device has sent token rows)"
        watchdog, progress = self._sync.watchdog(what), ctypes.c_int64()
        args = request.done, request.number, min(_SLICE, watchdog.interval), progress
        while self._alive():
            code = self._library.overspill_runner_wait(self._handle, *args)
            if code != _TIMED_OUT:
                return bool(code == _DONE)
            with self._sync.lock:
                self._sync.raise_error()
                watchdog.check(progress.value)
        return False

    def close(self) -> None:
        """End the thread after the request that it computes, and discard the others. Another thread
        may be in `wait`."""
        if self._alive():
            self._closed = True
            self._library.overspill_runner_close(self._handle)

    def __del__(self) -> None:
        # here and not in close(): another thread may still use the native object
        if os.getpid() == self._process:
            self._library.overspill_runner_free(self._handle)

    def _submit(self, args: GroupArgs, request: CpuRequest) -> None:
        self.check()
        if not self._alive():
            raise EngineError("the CPU runner was closed, or is another process's; load the model")
        ready, done, number, times = request
        self._library.overspill_runner_submit(
            self._handle, args, ready, done, number, times, self._callback
        )

    def _alive(self) -> bool:
        """Return whether the thread runs: not after close(), and not in a forked child."""
        return not self._closed and os.getpid() == self._process
