"""Makes transfers, updates and file operations fail, or interrupts the main thread at a call."""

import errno
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import overspill
from overspill.transfer.streams import Defer
from tests.fuzz.late import LateStream
from tests.fuzz.program import Fault

INJECTED = "injected fault"
_FILE_CALLS = (
    "open", "pread", "preadv", "pwrite", "pwritev", "fsync", "rename", "replace", "mkdir",
    "posix_fallocate",
)  # fmt: skip
_SOURCE = str(Path(overspill.__file__).parent)


class Faults:
    """`inject` is for `Settings.inject`. Within `during(fault)` the fault may fire; one that waits
    for a worker thread may fire later."""

    def __init__(self, delays: int | None, late: int | None = None) -> None:
        self.fired: Counter[str] = Counter()
        self.pending = False  # a fault has fired and the program has not recovered from it
        self._armed: Fault | None = None
        self._seen = 0
        self._lock = threading.Lock()
        self._delays = None if delays is None else random.Random(delays)
        self._inside = False
        self._main = threading.main_thread().ident
        self._streams: dict[str, LateStream] = {}
        if late is not None:
            self._streams = {kind: LateStream(kind, late) for kind in ("upload", "download")}

    def inject(self, kind: str) -> Defer | None:
        if self._delays is not None:
            time.sleep(self._delays.random() * 5e-4)
        self._count(kind)
        stream = self._streams.get(kind)
        return None if stream is None else stream.defer

    def close(self) -> None:
        """After the engine."""
        for stream in self._streams.values():
            stream.close()

    def _count(self, kind: str) -> None:
        with self._lock:
            fault = self._armed
            if fault is None or fault.kind != kind:
                return
            self._seen += 1
            if self._seen <= fault.nth:
                return
            self._armed = None
            self.fired[f"{kind} {'interrupt' if fault.interrupt else 'error'}"] += 1
            self.pending = True
        if not fault.interrupt:
            raise OSError(errno.EIO, INJECTED)
        if threading.get_ident() == self._main:
            raise KeyboardInterrupt(INJECTED)
        if self._main is not None:
            signal.pthread_kill(self._main, signal.SIGINT)

    def disarm(self) -> None:
        with self._lock:
            self._armed = None

    @contextmanager
    def during(self, fault: Fault | None) -> Iterator[None]:
        if fault is not None:
            with self._lock:
                self._armed, self._seen = fault, 0
        self._inside = True
        try:
            with _files(self._file_call(fault)), _calls(self._call(fault)):
                yield
        finally:
            self._inside = False

    def _file_call(self, fault: Fault | None) -> Callable[[], None] | None:
        if fault is None or fault.kind != "file":
            return None
        return lambda: self._count("file")

    def _call(self, fault: Fault | None) -> Callable[[], None] | None:
        if fault is None or fault.kind != "call":
            return None
        return lambda: self._count("call")

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """An interrupt that arrives after its operation is dropped."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self._inside:
                raise KeyboardInterrupt(INJECTED)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _files(count: Callable[[], None] | None) -> Iterator[None]:
    """Calls `count` before each call of the operating system that works on a file."""
    if count is None:
        yield
        return
    before = {name: getattr(os, name) for name in _FILE_CALLS}

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            count()
            return call(*args, **kwargs)

        return wrapper

    for name, call in before.items():
        setattr(os, name, counted(call))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(os, name, call)


@contextmanager
def _calls(count: Callable[[], None] | None) -> Iterator[None]:
    """Calls `count` at each call of a function of Overspill in this thread: there the interpreter
    looks for signals."""
    if count is None:
        yield
        return

    def trace(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_SOURCE):
            count()

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
