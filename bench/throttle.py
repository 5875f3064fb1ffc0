"""A link between host and GPU memory that is slower than that of this machine."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from loopback import _check, _clock_kernels
from torch import Tensor

from overspill.transfer import streams
from overspill.transfer.driver import _entered


class _Clock:
    """Clock that lets a stream take a given time or more for the work queued between two calls."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        driver = ctypes.PyDLL("libcuda.so.1")  # keeps the interpreter's lock: calls return at once
        self._begin, self._hold = _clock_kernels(driver, stream.device)
        self._launch = driver.cuLaunchKernel
        pointer = ctypes.c_void_p
        numbers = [ctypes.c_uint] * 7
        self._launch.argtypes = [pointer, *numbers, pointer, ctypes.POINTER(pointer), pointer]
        with torch.inference_mode(False):
            self._time = torch.zeros(1, dtype=torch.int64, device=stream.device)
        torch.cuda.synchronize(stream.device)

    def begin(self) -> None:
        self._run(self._begin, 0)

    def hold(self, nanoseconds: int) -> None:
        self._run(self._hold, nanoseconds)

    def _run(self, kernel: int | None, nanoseconds: int) -> None:
        values = ctypes.c_uint64(self._time.data_ptr()), ctypes.c_uint64(nanoseconds)
        arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        with _entered(self._stream.device):
            sizes = 1, 1, 1, 1, 1, 1, 0
            code = self._launch(kernel, *sizes, self._stream.cuda_stream, arguments, None)
        _check(code, "launch a kernel of the clock")


@contextmanager
def throttled(gigabytes_per_second: float | None) -> Iterator[None]:
    """Within it, uploads and downloads of experts take the time that a link of this speed needs, or
    longer, in each direction. Engines need `uploader="thread"`: the native one calls the driver
    itself. Token rows of CPU experts, which are few, are as fast as they are."""
    if gigabytes_per_second is None or not torch.cuda.is_available():
        yield
        return
    rate, plain = gigabytes_per_second, streams.copy_on
    clocks: dict[int, _Clock] = {}

    def copy(stream: Any, destination: Tensor, source: Tensor) -> None:
        clock = clocks.get(stream.cuda_stream)
        if clock is None:
            clock = clocks[stream.cuda_stream] = _Clock(stream)
        clock.begin()
        plain(stream, destination, source)
        clock.hold(round(source.nbytes / rate))

    streams.copy_on = copy
    try:
        yield
    finally:
        torch.cuda.synchronize()
        streams.copy_on = plain
