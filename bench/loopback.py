"""An exchange of one process with itself, to measure on one GPU how much of an exchange is hidden.

Token rows are copied to pinned host memory and back by the copy engines. With a rate, a transfer
takes at least the time that its bytes need at this rate, from the end of the one before or from the
time at which its rows are there: a kernel of one thread waits for the rest of it.
"""

import ctypes
import functools
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.hardware.native import load_library
from overspill.moe.engine import Engine
from overspill.moe.rank_rows import RankRows
from overspill.moe.row_placer import RowPlacer
from overspill.parallel.exchange.interface import Exchange, Transfer
from overspill.trace.recorder import Recorder
from overspill.transfer.driver import Event, _entered, current_stream, event_handle, new_event
from overspill.transfer.streams import Inject, StreamEvent
from overspill.transfer.work_stream import WorkStream

_LARGEST, _SMALLEST = 4 << 20, 1 << 19
"""Bytes of a piece, which arrives while the next one leaves. Between two GPUs the last byte arrives
when it has left; here the last piece must be copied once more, so it is small. Many pieces take the
host more time."""
_HERE = Path(__file__).parent


def loop_back(engine: Engine, exchange: Exchange) -> None:
    """From the next pass on, send the token rows of the engine's one process through `exchange`."""
    assert engine.ranks is None, "rows of several ranks travel already; offload without a mesh"
    with engine.exclusive():
        placer = RowPlacer(exchange.size, None)
        engine.rank_rows = RankRows(exchange, engine._store, placer, engine._pass_conditions)


class _HostBuffer:
    """Pinned memory that a transfer passes through."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = device.type == "cuda"
        self.free = new_event(device, blocking=True) if self._pinned else None
        """When the last transfer has left the memory."""

    def of(self, size: int) -> Tensor:
        if len(self._memory) < size:
            if self.free is not None:
                self.free.synchronize()  # a transfer uses the memory that is replaced
            with torch.inference_mode(False):  # later passes may train
                grown = size + size // 4
                self._memory = torch.empty(grown, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory


class LoopbackExchange(Exchange):
    def __init__(
        self,
        device: torch.device | str,
        gigabytes_per_second: float | None = None,
        recorder: Recorder | None = None,
        inject: Inject | None = None,
    ) -> None:
        """Without a rate transfers are as fast as the link."""
        super().__init__(device, recorder, inject)
        if gigabytes_per_second is not None and not gigabytes_per_second > 0:
            raise ConfigError(
                f"gigabytes_per_second={gigabytes_per_second} must be above 0; leave it out for "
                "the full speed of the link"
            )
        self._rate = gigabytes_per_second
        self._link = WorkStream("exchange", self.device, self.recorder, inject)
        # the next transfer leaves while one arrives
        self._buffers = _HostBuffer(self.device), _HostBuffer(self.device)
        if self._link.stream is not None:
            self._ready = new_event(self.device, blocking=False)
            self._host_link = HostLink(self._link.stream, self._rate is not None)

    def _mark(self) -> StreamEvent:
        """Record the same event each time: the streams wait for it before the next transfer."""
        if self.device.type != "cuda":
            return super()._mark()
        self._ready.record(current_stream(self.device))
        return StreamEvent(self._ready)

    def _transfer(self, transfer: Transfer) -> StreamEvent:
        rows, result, sent, received, ready, label = transfer
        assert sent == received, "one process sends all rows to itself"
        size = rows.nbytes
        buffer, other = self._buffers
        self._buffers = other, buffer
        nanoseconds = 0 if self._rate is None else round(size / self._rate)
        if self.device.type != "cuda":
            copy = partial(_copy_at_rate, result, buffer.of(size), rows, nanoseconds)
            return self._link.run(copy, (), label, size)
        work = partial(self._copy, result, buffer, rows, nanoseconds)
        return self._link.run(work, [ready], label, size)

    def _copy(self, target: Tensor, buffer: _HostBuffer, source: Tensor, nanoseconds: int) -> None:
        if source.nbytes == 0:
            return
        host = buffer.of(source.nbytes)
        assert buffer.free is not None
        self._host_link.copy(target, host, source, nanoseconds, self._ready, buffer.free)


def _copy_at_rate(target: Tensor, host: Tensor, source: Tensor, nanoseconds: int) -> None:
    end = time.perf_counter_ns() + nanoseconds
    there = host[: source.nbytes].view(source.dtype).view_as(source)
    there.copy_(source)
    target.copy_(there)
    if (rest := end - time.perf_counter_ns()) > 0:
        time.sleep(rest / 1e9)


class Link(ctypes.Structure):
    """Rates and times of a link, with the layout of loopback.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("copy", "record", "wait", "launch")),
        ("begin", ctypes.c_void_p),
        ("hold", ctypes.c_void_p),
        ("clock", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("outwards", "inwards", "handover")),
        ("largest", ctypes.c_size_t),
        ("smallest", ctypes.c_size_t),
    )


class HostLink:
    """Copies from device to device through host memory: a stream of its own carries bytes to the
    host, `inwards` back to the device."""

    def __init__(self, inwards: torch.cuda.Stream, has_rate: bool) -> None:
        """With a rate, a copy takes a given time or more: a kernel of one thread waits for it."""
        device = inwards.device
        self._copy = native_copy()
        self._inwards, self._outwards = inwards, torch.cuda.Stream(device)
        self._handover = new_event(device, blocking=False)
        with torch.inference_mode(False):  # later passes may train
            self._clock = torch.zeros(1, dtype=torch.int64, device=device)
        driver = ctypes.PyDLL("libcuda.so.1")  # keeps the interpreter's lock: calls return at once
        calls = "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"
        kernels = _clock_kernels(driver, device) if has_rate else [None, None]
        self._link = Link(
            *(ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in calls),
            *kernels,
            self._clock.data_ptr(),
            self._outwards.cuda_stream,
            inwards.cuda_stream,
            event_handle(self._handover),
            _LARGEST,
            _SMALLEST,
        )

    def copy(
        self,
        destination: Tensor,
        host: Tensor,
        source: Tensor,
        nanoseconds: int,
        ready: Event,
        free: Event,
    ) -> None:
        """Queues a copy of contiguous tensors through `host`. The inward stream waits for `ready`
        already, the other one does here, and for `free`, which is recorded when `host` is free."""
        addresses = destination.data_ptr(), host.data_ptr(), source.data_ptr()
        events = event_handle(ready), event_handle(free)
        with _entered(self._inwards.device):
            code = self._copy(
                ctypes.byref(self._link), *addresses, source.nbytes, nanoseconds, *events
            )
        _check(code, "copy token rows")


@functools.cache
def native_copy() -> Any:
    """The function of loopback.cpp."""
    library = load_library(_HERE / "loopback.cpp", "loopback")
    if library is None:
        raise ConfigError("LoopbackExchange on a GPU needs a C++ compiler; install g++ or set CXX")
    pointer, number, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
    function = library.overspill_link_copy
    function.argtypes = [pointer, *[number] * 3, size, number, pointer, pointer]
    return function


def _clock_kernels(driver: ctypes.PyDLL, device: torch.device) -> Sequence[int | None]:
    """The kernels of clock.ptx, for the device. They are never unloaded."""
    module, begin, hold = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    with _entered(device):
        text = (_HERE / "clock.ptx").read_bytes() + b"\0"
        _check(driver.cuModuleLoadData(ctypes.byref(module), text), "load kernels")
        for kernel, name in ((begin, b"overspill_begin"), (hold, b"overspill_hold")):
            _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, name), "find a kernel")
    return begin.value, hold.value


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver could not {what}: error {code}")
