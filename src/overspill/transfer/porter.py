"""The porter: a native thread that issues uploads, piece by piece and most urgent first, while the
interpreter is busy with something else.

To issue a copy from Python takes the interpreter's lock for some fifty microseconds, and the thread
that launches kernels has to wait for it, thousands of times a second.
"""

import array
import ctypes
import functools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overspill.core.errors import EngineError
from overspill.hardware.native import load_library
from overspill.transfer.driver import PorterCalls
from overspill.transfer.lanes import Mark

_MOST_LINES = 4096
_LATER, _CLOSED = -1, -2  # as in porter.cpp


class Order(ctypes.Structure):
    """The record that belongs in a slot, as porter.cpp reads it. A new number says that it is
    another one."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("after", ctypes.c_void_p),
        ("number", ctypes.c_uint64),
        ("tag", ctypes.c_int64),
    )


class Line(ctypes.Structure):
    """A piece that was carried while traced."""

    _fields_ = (
        ("tag", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("begin_ns", ctypes.c_int64),
        ("end_ns", ctypes.c_int64),
    )


class Limits(NamedTuple):
    """How many bytes may be on their way when another piece is issued: of a guess, of what is
    needed for sure."""

    guesses: int
    sures: int


class Arrival:
    """The end of a piece, as an event."""

    __slots__ = ("porter", "sequence")

    def __init__(self, porter: "Porter", sequence: int) -> None:
        self.porter = porter
        self.sequence = sequence

    def record(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("an arrival is recorded by the porter")

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Makes the stream wait for it, not the caller."""
        self.porter.stream_waits(stream, self.sequence)

    def query(self) -> bool:
        return self.porter.passed() >= self.sequence

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(5e-5)


class Porter:
    """`orders[slot]` says what belongs in a slot, and `carry` which of it to carry. `issued[slot]`
    is the number of the last order all of whose pieces were issued, `ends[slot]` the sequence of
    the last of them."""

    def __init__(self, calls: PorterCalls, n_slots: int, record: int, piece: int) -> None:
        library = porter_library()
        assert library is not None
        self._library = library
        self._calls = calls
        self._lock = threading.Lock()
        self._inside = 0  # calls that may still be at it
        self._process, self._stopped = os.getpid(), False
        counters = torch.zeros(2, dtype=torch.int64)
        self._memory = counters.pin_memory() if calls.pinned else counters
        self._counters = (ctypes.c_uint64 * 2).from_address(self._memory.data_ptr())
        self.orders = (Order * n_slots)()
        self.issued = (ctypes.c_uint64 * n_slots)()
        self.ends = (ctypes.c_uint64 * n_slots)()
        self._porter: int | None = library.overspill_porter_new(
            calls.table,
            calls.context,
            calls.stream,
            n_slots,
            record,
            piece,
            self._memory.data_ptr(),
            self.issued,
            self.ends,
        )

    def passed(self) -> int:
        """The sequence of the last piece that has arrived."""
        return self._counters[0]

    def arrival(self, slots: Sequence[int]) -> Mark | None:
        """When the records that were issued into these slots are all there; None if they are."""
        last = max(self.ends[slot] for slot in slots)
        return None if last <= self._counters[0] else Mark(Arrival(self, last))

    def stream_waits(self, stream: torch.cuda.Stream, sequence: int) -> None:
        self._calls.stream_waits(stream, self._memory.data_ptr(), sequence)

    def carry(self, items: Sequence[int], limits: Limits, trace: bool) -> None:
        """What to carry from now on, the most urgent first: slots, each followed by whether it is
        sure (0 or 1). What was to be carried before is dropped; what had begun goes on if it comes
        again."""
        packed = array.array("i", items)
        address, _ = packed.buffer_info()
        args = self.orders, address, len(packed) // 2, *limits, trace
        self._call("carry", *args)

    def wait(self, orders: Sequence[tuple[int, int]], every: bool) -> None:
        """Waits until one of these (slot, number), or `every` one, or a later one for the slot, has
        been issued; a moment at most, so that the caller can look whether he still wants it."""
        slots = (ctypes.c_int32 * len(orders))(*(slot for slot, _ in orders))
        numbers = (ctypes.c_uint64 * len(orders))(*(number for _, number in orders))
        self._call("wait", slots, numbers, len(orders), every)

    def settle(self) -> None:
        """Blocks until all that was ordered has been issued."""
        while self._call("settle") == _LATER:
            pass

    def _call(self, name: str, *args: object) -> int:
        with self._lock:
            porter = self._porter
            if porter is None:
                raise EngineError("the engine was closed")
            self._inside += 1
        try:
            code = int(getattr(self._library, f"overspill_porter_{name}")(porter, *args))
        finally:
            with self._lock:
                self._inside -= 1
        if code == _CLOSED:
            raise EngineError("the engine was closed while it was waited for")
        if code > 0:
            raise EngineError(f"the CUDA driver could not upload experts: error {code}")
        return code

    def take_lines(self) -> tuple[list[Line], int]:
        """The pieces that were traced, and the bytes carried, since the last time."""
        found: list[Line] = []
        total, count = 0, _MOST_LINES
        if self._is_child():
            return found, total
        with self._lock:  # nobody frees it meanwhile
            while self._porter is not None and count == _MOST_LINES:
                lines, size = (Line * _MOST_LINES)(), ctypes.c_int64()
                args = lines, _MOST_LINES, ctypes.byref(size)
                count = self._library.overspill_porter_lines(self._porter, *args)
                found += lines[:count]
                total += size.value
        return found, total

    def stop(self) -> None:
        """Ends the thread; what it has carried can still be asked for."""
        if self._is_child():
            return
        with self._lock:
            first, self._stopped = not self._stopped, True
        if first:
            self._library.overspill_porter_stop(self._porter)

    def close(self) -> None:
        self.stop()
        if self._is_child():
            return
        with self._lock:
            porter, self._porter = self._porter, None
        while self._inside:  # whoever waits has been told
            time.sleep(1e-4)
        if porter is not None:
            self._library.overspill_porter_free(porter)

    def _is_child(self) -> bool:
        """Forked, and so without the thread; its locks may be held for ever."""
        return os.getpid() != self._process


@functools.cache
def porter_library() -> ctypes.CDLL | None:
    """None without a compiler."""
    library = load_library(Path(__file__).with_name("porter.cpp"), "porter")
    if library is None:
        return None
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    types: dict[str, tuple[Any, list[Any]]] = {
        "new": (pointer, [pointer, pointer, pointer, size, size, size, pointer, pointer, pointer]),
        "stop": (None, [pointer]),
        "free": (None, [pointer]),
        "carry": (flag, [pointer, pointer, pointer, size, size, size, flag]),
        "wait": (flag, [pointer, pointer, pointer, size, flag]),
        "settle": (flag, [pointer]),
        "lines": (size, [pointer, pointer, size, pointer]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, f"overspill_porter_{name}")
        function.restype, function.argtypes = result, arguments
    return library
