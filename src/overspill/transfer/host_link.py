"""Copies from device to device through pinned host memory, at the speed of a given link."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.hardware.native import load_library
from overspill.transfer.driver import Event, LinkCalls, event_handle, in_context, new_event

_LARGEST, _SMALLEST = 4 << 20, 1 << 19
"""Bytes of a piece, which arrives while the next one leaves. Between two GPUs the last byte arrives
when it has left; here the last piece must be copied once more, so it is small. Many pieces take the
host more time."""
_CLOCK = Path(__file__).with_name("clock.ptx")


class Link(ctypes.Structure):
    """As in host_link.cpp."""

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
    """What leaves goes through a stream of its own, what arrives through `inwards`."""

    def __init__(self, inwards: torch.cuda.Stream, has_rate: bool) -> None:
        """With a rate, a copy takes a given time or more: a kernel of one thread waits for it."""
        device = inwards.device
        self._copy = native_copy()
        self._inwards, self._outwards = inwards, torch.cuda.Stream(device)
        self._handover = new_event(device, blocking=False)
        with torch.inference_mode(False):  # later passes may train
            self._clock = torch.zeros(1, dtype=torch.int64, device=device)
        calls = LinkCalls.of(device)
        kernels: list[int | None] = [None, None]
        if has_rate:
            names = "overspill_begin", "overspill_hold"
            kernels = [*calls.load(_CLOCK.read_bytes(), names)]
        streams = self._outwards.cuda_stream, inwards.cuda_stream
        handover = event_handle(self._handover)
        self._link = Link(
            *calls.addresses,
            *kernels,
            self._clock.data_ptr(),
            *streams,
            handover,
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
        with in_context(self._inwards.device):
            code = self._copy(
                ctypes.byref(self._link), *addresses, source.nbytes, nanoseconds, *events
            )
        if code:
            raise RuntimeError(f"the CUDA driver could not copy token rows: error {code}")


@functools.cache
def native_copy() -> Any:
    """The function of host_link.cpp."""
    library = load_library(Path(__file__).with_name("host_link.cpp"), "host-link")
    if library is None:
        raise ConfigError("LoopbackExchange on a GPU needs a C++ compiler; install g++ or set CXX")
    pointer, number, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
    function = library.overspill_link_copy
    function.argtypes = [pointer, *[number] * 3, size, number, pointer, pointer]
    return function
