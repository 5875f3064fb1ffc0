"""Copies, events and streams through the CUDA driver API.

Thousands of copies are issued per second while another thread launches kernels, and both threads
need the interpreter's lock. Torch's `copy_` and events hold it for 0.1 ms per copy and release it
several times, and each handover costs as much again. Driver calls take a few microseconds and
release the lock only to wait.
"""

import ctypes
import functools
import logging
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

_log = logging.getLogger("overspill")
_thread_state = threading.local()
_NO_SWITCH: AbstractContextManager[object] = nullcontext()
_NOT_READY = 600
_BLOCKING, _NO_TIMING = 1, 2
_NON_BLOCKING = 1
"""A stream that does not wait for the default stream."""


class Event(Protocol):
    """The interface of torch.cuda.Event and `_DriverEvent`."""

    def record(self, stream: torch.cuda.Stream) -> None: ...

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Make the stream, not the caller, wait for the event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


def new_event(device: torch.device, blocking: bool) -> Event:
    """Return a new event. A thread that waits for a `blocking` event sleeps instead of polling."""
    driver = _driver()
    if driver is None:
        return torch.cuda.Event(blocking=blocking)
    with _entered(device):
        return _DriverEvent(driver, blocking)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return torch's current stream. Torch takes ten times as long to find the stream of a device
    without an index."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.current_stream(index)


@functools.cache
def own_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return a stream that has no other user, one for each purpose. Torch has 32 streams, which
    it gives out again and again: work of other threads might get into a graph that is captured."""
    driver = _driver()
    if driver is None:
        return torch.cuda.Stream(device)
    handle = ctypes.c_void_p()
    with _entered(device):
        driver.check(driver.new_stream(ctypes.byref(handle), _NON_BLOCKING), "create a stream")
    return torch.cuda.ExternalStream(handle.value, device)


def copy_on(stream: torch.cuda.Stream, destination: Tensor, source: Tensor) -> None:
    """Queue a copy between pinned host memory and the device, in either direction."""
    driver = _driver()
    plain = destination.is_contiguous() and source.is_contiguous()
    if driver is None or not plain or destination.dtype != source.dtype:
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
        return
    assert destination.numel() == source.numel()
    pointers = destination.data_ptr(), source.data_ptr()
    with _entered(stream.device):
        driver.check(driver.copy(*pointers, source.nbytes, stream.cuda_stream), "copy")


def can_signal(stream: torch.cuda.Stream, address: int) -> bool:
    """Whether the stream can write a value to pinned memory and wait for one; tries it."""
    driver = _driver()
    if driver is None or driver.write_value32 is None or driver.wait_value32 is None:
        _log.warning("CPU experts are off: the CUDA driver lacks stream memory operations")
        return False
    with _entered(stream.device):
        codes = (
            driver.write_value32(stream.cuda_stream, address, 0, 0),
            driver.wait_value32(stream.cuda_stream, address, 0, 0),
        )
    if any(codes):
        _log.warning("CPU experts are off: stream memory operations failed (error %s)", codes)
    return not any(codes)


def signal(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """Make the stream write `number` to pinned memory after all work queued before."""
    driver = _driver()
    assert driver is not None
    assert driver.write_value32 is not None
    with _entered(stream.device):
        driver.check(driver.write_value32(stream.cuda_stream, address, number, 0), "write a value")


def await_signal(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """Make the stream wait until the value in pinned memory is at least `number`."""
    driver = _driver()
    assert driver is not None
    assert driver.wait_value32 is not None
    with _entered(stream.device):
        code = driver.wait_value32(stream.cuda_stream, address, number, 0)
    driver.check(code, "wait for a value")


class CallTable(ctypes.Structure):
    """The driver's functions as upload_thread.cpp calls them."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("context", "copy", "wait", "write"))


class CudaUploadCalls:
    """The driver's functions for the upload thread: copies, and values that one stream writes and
    another stream waits for."""

    pinned = True

    def __init__(self, driver: "_Driver", stream: torch.cuda.Stream) -> None:
        assert driver.write_value64 is not None
        assert driver.wait_value64 is not None
        self._driver, self._wait_value64 = driver, driver.wait_value64
        self._upload = stream  # keeps the stream alive
        self.stream = stream.cuda_stream
        context = ctypes.c_void_p()
        with _entered(stream.device):
            driver.check(driver.current_context(ctypes.byref(context)), "return its context")
        self.context = context.value
        functions = driver.set_context, driver.copy, driver.stream_waits, driver.write_value64
        table = CallTable(*(ctypes.cast(call, ctypes.c_void_p).value for call in functions))
        self._table = table
        self.table = ctypes.addressof(table)

    def stream_waits(self, stream: torch.cuda.Stream, address: int, number: int) -> None:
        """Make the stream wait until the value in pinned memory is at least `number`."""
        with _entered(stream.device):
            code = self._wait_value64(stream.cuda_stream, address, number, 0)
        self._driver.check(code, "wait for a value")


def cuda_upload_calls(stream: torch.cuda.Stream) -> CudaUploadCalls | None:
    """Return the driver's functions; None if it lacks 64-bit stream memory operations. Tries
    them."""
    driver = _driver()
    if driver is None or driver.write_value64 is None or driver.wait_value64 is None:
        return None
    memory = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    arguments = stream.cuda_stream, memory.data_ptr(), 1, 0
    with _entered(stream.device):
        error = driver.write_value64(*arguments) or driver.wait_value64(*arguments)
    stream.synchronize()
    if error:
        _log.warning("64-bit stream memory operations failed (error %s)", error)
        return None
    return CudaUploadCalls(driver, stream)


def event_handle(event: Event | None) -> int | None:
    """Return the driver's handle of an event, for the upload thread."""
    assert event is None or isinstance(event, _DriverEvent)
    return None if event is None else event.handle


class _DriverEvent:
    __slots__ = ("_driver", "_handle")

    def __init__(self, driver: "_Driver", blocking: bool) -> None:
        self._driver = driver
        self._handle = ctypes.c_void_p()
        flags = _NO_TIMING | (_BLOCKING if blocking else 0)
        driver.check(driver.create(ctypes.byref(self._handle), flags), "create an event")

    @property
    def handle(self) -> int | None:
        return self._handle.value

    def record(self, stream: torch.cuda.Stream) -> None:
        driver = self._driver
        with _entered(stream.device):
            driver.check(driver.record(self._handle, stream.cuda_stream), "record an event")

    def wait(self, stream: torch.cuda.Stream) -> None:
        driver = self._driver
        with _entered(stream.device):
            code = driver.stream_waits(stream.cuda_stream, self._handle, 0)
        driver.check(code, "wait for an event")

    def query(self) -> bool:
        code = self._driver.query(self._handle)
        if code == _NOT_READY:
            return False
        self._driver.check(code, "query an event")
        return True

    def synchronize(self) -> None:
        self._driver.check(self._driver.synchronize(self._handle), "wait for an event")

    def __del__(self) -> None:
        # at exit the driver may be unloaded before its events
        if self._handle and ctypes is not None:
            self._driver.destroy(self._handle)


class _Driver:
    """The driver's functions. Calls that return immediately keep the interpreter's lock, because
    releasing it takes longer than the call."""

    def __init__(self) -> None:
        library = ctypes.PyDLL("libcuda.so.1")
        pointer, address, flags = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
        new_pointer = ctypes.POINTER(pointer)

        def bind(name: str, *types: Any, optional: bool = False) -> Any:
            function = getattr(library, name, None) if optional else getattr(library, name)
            if function is not None:
                function.argtypes = types
            return function

        self.copy = bind("cuMemcpyAsync", address, address, ctypes.c_size_t, pointer)
        self.create = bind("cuEventCreate", new_pointer, flags)
        self.destroy = bind("cuEventDestroy_v2", pointer)
        self.record = bind("cuEventRecord", pointer, pointer)
        self.new_stream = bind("cuStreamCreate", new_pointer, flags)
        self.stream_waits = bind("cuStreamWaitEvent", pointer, pointer, flags)
        self.query = bind("cuEventQuery", pointer)
        self.current_context = bind("cuCtxGetCurrent", new_pointer)
        self.set_context = bind("cuCtxSetCurrent", pointer)
        value32 = pointer, address, ctypes.c_uint32, flags
        self.write_value32 = bind("cuStreamWriteValue32_v2", *value32, optional=True)
        self.wait_value32 = bind("cuStreamWaitValue32_v2", *value32, optional=True)
        value64 = pointer, address, ctypes.c_uint64, flags
        self.write_value64 = bind("cuStreamWriteValue64_v2", *value64, optional=True)
        self.wait_value64 = bind("cuStreamWaitValue64_v2", *value64, optional=True)
        # this one waits, so it releases the lock
        self.synchronize = ctypes.CDLL("libcuda.so.1").cuEventSynchronize
        self.synchronize.argtypes = [pointer]

    def check(self, code: int, what: str) -> None:
        if code != 0:
            raise RuntimeError(f"the CUDA driver could not {what}: error {code}")


def _entered(device: torch.device) -> AbstractContextManager[object]:
    """Make the device's context current and restore the device afterwards. A thread has no
    context before its first CUDA call."""
    here = torch.cuda.current_device()
    if not getattr(_thread_state, "bound", False):
        torch.cuda.set_device(here)
        _thread_state.bound = True
    return _NO_SWITCH if device.index in (None, here) else torch.cuda.device(device)


@functools.cache
def _driver() -> _Driver | None:
    try:
        return _Driver()
    except (OSError, AttributeError) as error:
        _log.warning("copies go through torch, which is slower: no CUDA driver library (%s)", error)
        return None
