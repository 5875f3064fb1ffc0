"""Python interface of `upload_thread.cpp`: a native thread that issues uploads.

Issuing a copy from Python holds the interpreter's lock for some 50 microseconds, and the thread
that launches kernels has to wait for it, thousands of times a second.
"""

import array
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from overspill.core.errors import EngineError
from overspill.hardware.native import load_library
from overspill.transfer.streams import StreamEvent

_TRACE_BATCH = 4096
_TIMED_OUT, _CLOSED = -1, -2  # as in upload_thread.cpp
_InjectCallback = ctypes.CFUNCTYPE(ctypes.c_int)


class UploadCalls(Protocol):
    """The functions the thread calls, of the CUDA driver or of the CPU."""

    @property
    def pinned(self) -> bool:
        """Whether the counters must be in pinned memory."""

    @property
    def table(self) -> int: ...
    @property
    def context(self) -> int | None: ...
    @property
    def stream(self) -> int | None: ...

    def stream_waits(self, stream: torch.cuda.Stream, address: int, number: int) -> None:
        """Make the stream wait until the number at `address` is at least `number`."""


class HostCalls:
    """The CPU as the compute device: a copy has ended when the call returns."""

    pinned = False
    context: int | None = None
    stream: int | None = None

    def __init__(self) -> None:
        library = upload_library()
        assert library is not None
        self.table = int(library.overspill_upload_host_calls())

    def stream_waits(self, stream: torch.cuda.Stream, address: int, number: int) -> None:
        raise AssertionError("there is no stream to wait on")


class UploadCommand(ctypes.Structure):
    """The record that belongs in a slot. A new number means another record or new weights."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("after", ctypes.c_void_p),
        ("number", ctypes.c_uint64),
        ("tag", ctypes.c_int64),
        ("in_device", ctypes.c_int64),  # the source is a replica
        ("bytes", ctypes.c_int64),
    )


class TracedCopy(ctypes.Structure):
    """A piece that was copied while tracing was on."""

    _fields_ = (
        ("tag", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("begin_ns", ctypes.c_int64),
        ("end_ns", ctypes.c_int64),
    )


class InFlightLimits(NamedTuple):
    """Bytes that may be in flight when another piece is issued, by kind of upload."""

    expected: int
    certain: int


class ArrivalEvent:
    """The end of a piece, with the interface of a CUDA event."""

    __slots__ = ("_sequence", "_thread")

    def __init__(self, thread: "UploadThread", sequence: int) -> None:
        self._thread = thread
        self._sequence = sequence

    def record(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("an arrival is recorded by the upload thread")

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Make the stream, not the caller, wait for the piece."""
        self._thread.stream_waits(stream, self._sequence)

    def query(self) -> bool:
        return self._thread.completed() >= self._sequence

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(5e-5)


class UploadThread:
    """The native thread. `commands[slot]` has the record that belongs in a slot; `set_uploads`
    chooses the commands to carry out. `issued[slot]` is the number of the last command all of whose
    pieces were issued, `ends[slot]` the sequence number of its last piece."""

    def __init__(
        self,
        calls: UploadCalls,
        n_slots: int,
        record: int,
        piece: int,
        inject: Callable[[], object] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`record` are the bytes of each record, unless its command has others."""
        library = upload_library()
        assert library is not None
        self._library = library
        self._calls = calls
        self._lock = threading.Lock()
        self._active_calls: set[object] = set()
        self._process, self._stopped = os.getpid(), False
        counters = torch.zeros(2, dtype=torch.int64)
        self._memory = counters.pin_memory() if calls.pinned else counters
        self._counters = (ctypes.c_uint64 * 2).from_address(self._memory.data_ptr())
        self.commands = (UploadCommand * n_slots)()
        for command in self.commands:
            command.bytes = record
        self.issued = (ctypes.c_uint64 * n_slots)()
        self.ends = (ctypes.c_uint64 * n_slots)()
        self._failure: BaseException | None = None
        self._on_error = on_error
        self._inject = self._callback(inject)
        self._handle: int | None = library.overspill_upload_new(
            calls.table,
            calls.context,
            calls.stream,
            n_slots,
            piece,
            self._memory.data_ptr(),
            self.issued,
            self.ends,
            self._inject,
        )

    def completed(self) -> int:
        """Return the sequence number of the last piece that has arrived."""
        return self._counters[0]

    def arrival(self, slots: Sequence[int]) -> StreamEvent | None:
        """Return the event after which all records issued into these slots have arrived; None if
        they have."""
        last = max(self.ends[slot] for slot in slots)
        return None if last <= self._counters[0] else StreamEvent(ArrivalEvent(self, last))

    def stream_waits(self, stream: torch.cuda.Stream, sequence: int) -> None:
        self._calls.stream_waits(stream, self._memory.data_ptr(), sequence)

    def set_uploads(self, items: Sequence[int], limits: InFlightLimits, trace: bool) -> None:
        """Replace the list of uploads, most urgent first: slots, each followed by whether it is
        certain (0 or 1). An upload that has begun continues if it is listed again."""
        packed = array.array("i", items)
        address, _ = packed.buffer_info()
        self._call("set", self.commands, address, len(packed) // 2, *limits, trace)

    def wait(self, commands: Sequence[tuple[int, int]], every: bool) -> bool:
        """Wait until one of these commands (slot, number), or `every` one, or a later command for
        the slot, was issued. False after 0.1 s, so that the caller can check whether it still wants
        the upload."""
        slots = (ctypes.c_int32 * len(commands))(*(slot for slot, _ in commands))
        numbers = (ctypes.c_uint64 * len(commands))(*(number for _, number in commands))
        return self._call("wait", slots, numbers, len(commands), every) != _TIMED_OUT

    def wait_idle(self) -> bool:
        """Wait until all uploads were issued; False after 0.1 s."""
        return self._call("wait_idle") != _TIMED_OUT

    def _call(self, name: str, *args: object) -> int:
        call = object()
        try:
            with self._lock:
                handle = self._handle
                if handle is None:
                    raise EngineError("the engine was closed")
                self._active_calls.add(call)
            code = int(getattr(self._library, f"overspill_upload_{name}")(handle, *args))
        finally:
            self._active_calls.discard(call)  # one operation: an interrupt cannot leave it behind
        if code == _CLOSED:
            raise EngineError("the engine was closed while an upload was awaited")
        if code > 0:
            reason = f"CUDA driver error {code}" if self._failure is None else repr(self._failure)
            raise EngineError(f"uploading experts failed: {reason}") from self._failure
        return code

    def _callback(self, inject: Callable[[], object] | None) -> Any:
        """Return a C function that calls `inject` and returns 1 if that raises."""
        if inject is None:
            return _InjectCallback()

        def call() -> int:
            try:
                inject()
            except BaseException as error:  # must not leave a C callback
                self._failure = error
                if self._on_error is not None:
                    self._on_error(error)
                return 1
            return 0

        return _InjectCallback(call)

    def take_traced(self) -> tuple[list[TracedCopy], int, int]:
        """Return the traced pieces, and the bytes issued since the last call: of uploads, and of
        copies of replicas."""
        found: list[TracedCopy] = []
        uploaded, in_device, count = 0, 0, _TRACE_BATCH
        if self._is_forked():
            return found, uploaded, in_device
        with self._lock:  # `close` must not free the thread meanwhile
            while self._handle is not None and count == _TRACE_BATCH:
                copies, sizes = (TracedCopy * _TRACE_BATCH)(), (ctypes.c_int64 * 2)()
                args = copies, _TRACE_BATCH, sizes
                count = self._library.overspill_upload_traced(self._handle, *args)
                found += copies[:count]
                uploaded, in_device = uploaded + sizes[0], in_device + sizes[1]
        return found, uploaded, in_device

    def stop(self) -> None:
        """End the thread; the trace can still be read."""
        if self._is_forked():
            return
        with self._lock:
            first, self._stopped = not self._stopped, True
        if first:
            self._library.overspill_upload_stop(self._handle)

    def close(self) -> None:
        self.stop()
        if self._is_forked():
            return
        with self._lock:
            handle, self._handle = self._handle, None
        while self._active_calls:  # waiting callers were woken by `stop`
            time.sleep(1e-4)
        if handle is not None:
            self._library.overspill_upload_free(handle)

    def _is_forked(self) -> bool:
        """Whether this is a forked child, which does not have the thread; its locks may be held for
        ever."""
        return os.getpid() != self._process


@functools.cache
def upload_library() -> ctypes.CDLL | None:
    """Return the library; None without a compiler."""
    library = load_library(Path(__file__).with_name("upload_thread.cpp"), "upload-thread")
    if library is None:
        return None
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    types: dict[str, tuple[Any, list[Any]]] = {
        "host_calls": (pointer, []),
        "new": (pointer, [pointer] * 3 + [size] * 2 + [pointer] * 3 + [_InjectCallback]),
        "stop": (None, [pointer]),
        "free": (None, [pointer]),
        "set": (flag, [pointer, pointer, pointer, size, size, size, flag]),
        "wait": (flag, [pointer, pointer, pointer, size, flag]),
        "wait_idle": (flag, [pointer]),
        "traced": (size, [pointer, pointer, size, pointer]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, f"overspill_upload_{name}")
        function.restype, function.argtypes = result, arguments
    return library
