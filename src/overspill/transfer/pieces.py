"""Copies from device to device through pinned host memory, queued by `pieces.cpp`."""

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.hardware.native import load_library
from overspill.transfer.driver import Event, event_handle, piece_calls


class Duplex(NamedTuple):
    """Two streams between the device and host memory, and an event for handovers from the first to
    the second."""

    outwards: torch.cuda.Stream
    inwards: torch.cuda.Stream
    event: Event


def copy_through(
    duplex: Duplex, host: Tensor, destination: Tensor, source: Tensor, piece: int
) -> None:
    """Queues a copy through `host`, all contiguous, in pieces of so many bytes: while one arrives,
    the next one leaves."""
    addresses = destination.data_ptr(), host.data_ptr(), source.data_ptr()
    streams = duplex.outwards.cuda_stream, duplex.inwards.cuda_stream
    handle = event_handle(duplex.event)
    with piece_calls(duplex.inwards.device) as calls:
        error = native_copy()(calls, *addresses, source.nbytes, piece, *streams, handle)
    if error:
        raise RuntimeError(f"the CUDA driver could not copy token rows: error {error}")


@functools.cache
def native_copy() -> Any:
    """The function of `pieces.cpp`."""
    library = load_library(Path(__file__).with_name("pieces.cpp"), "pieces")
    if library is None:
        raise ConfigError(
            "a LoopbackExchange on a GPU needs a C++ compiler; install g++ or set CXX"
        )
    pointer, address, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
    function = library.overspill_copy_through
    function.argtypes = [pointer, *[address] * 3, size, size, *[pointer] * 3]
    return function
