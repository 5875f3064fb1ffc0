"""A fake CUDA driver for the native uploader: its work is done when a test says so."""

import ctypes
from collections import deque

from overspill.transfer.driver import CallTable
from tests.waiting import wait_until

_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)
_WRITE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint
)
_WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class FakeCalls:
    """A stream whose work is carried out by `arrive`, or at once. `code` is what calls return."""

    pinned = False
    context: int | None = None
    stream: int | None = None

    def __init__(self, at_once: bool = False, code: int = 0) -> None:
        self.at_once = at_once
        self.code = code
        self.work: deque[tuple[str, tuple[int, ...]]] = deque()
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self._functions = (
            _CONTEXT(lambda _: 0),
            _COPY(lambda to, source, size, _: self._do("copy", to, source, size)),
            _WAIT(lambda _, event, flags: self._do("wait", event or 0)),
            _WRITE(lambda _, address, number, flags: self._do("write", address, number)),
        )
        self._table = CallTable(*(ctypes.cast(f, ctypes.c_void_p).value for f in self._functions))
        self.table = ctypes.addressof(self._table)

    def _do(self, kind: str, *args: int) -> int:
        self.log.append((kind, args))
        self.work.append((kind, args))
        if self.at_once:
            self.arrive(1)
        return self.code

    def arrive(self, calls: int = 2) -> None:
        """Carries out the oldest calls; by default a copy and the write of its sequence number."""
        wait_until(lambda: len(self.work) >= calls)  # the thread may be between the two
        for _ in range(calls):
            kind, args = self.work.popleft()
            if kind == "copy":
                ctypes.memmove(*args)
            elif kind == "write":
                ctypes.c_uint64.from_address(args[0]).value = args[1]

    def stream_waits(self, stream: object, address: int, number: int) -> None:
        raise AssertionError("there is no stream to wait on")

    @property
    def sources(self) -> list[int]:
        """The source address of every copy."""
        return [args[1] for kind, args in self.log if kind == "copy"]
