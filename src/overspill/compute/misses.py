"""A native thread that computes the experts which a decoding step on the GPU does not find there.

A step of a model is one CUDA graph, so the host takes no part in it. In each layer a kernel writes
the token rows and the missing (row, expert, weight) to pinned memory. If there are any, the next
kernel, which computes the experts that are on the GPU, first resets `done[layer]` and then sets
`ready[layer]`. A later kernel waits until `done[layer]` is 1 and adds `out` to its sums.

Shapes: R token rows of the batch, P missing pairs of a row and an expert, L layers, E experts,
D model.
"""

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from overspill.compute.activation import Activation, form_of
from overspill.compute.cpu_kernel import (
    group_args,
    inject_callback,
    loaded_library,
    native_formats,
    raise_first,
    why_unsupported,
)
from overspill.compute.record_format import layer_formats
from overspill.core.errors import ConfigError, EngineError
from overspill.core.experts import ExpertShape
from overspill.core.garbage import pause_collection, resume_collection
from overspill.core.sizes import round_up
from overspill.tiers.layout import ALIGN, NO_LOW_RANKS, LowRanks, RecordLayout, WeightFormat
from overspill.tiers.slab import HostSlab
from overspill.tiers.worker_sync import WorkerSync

_FETCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_int64,
    # plain numbers: objects would be made, and garbage collected, before the call
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
_HOLD, _LEARN, _END_READS, _EXPECT, _RELEASE, _END_AHEAD = range(6)  # as in cpu_misses.h
_CACHE_LINE = 64
_MAX_SPANS = 4096  # as in cpu_misses.h
SPIN_NS = 2_000_000
"""Time that threads spin after a request for the next one. Layers of a step on a GPU follow each
other sooner."""


@dataclass(frozen=True)
class MissBuffers:
    """Memory that the GPU and the thread share, as seen by the host or by the device. All layers
    use the same rows: each waits for its results."""

    ready_L: Tensor
    """int32, 1: the request of a layer is complete. The thread resets it."""
    done_L: Tensor
    """int32, 1: the results are complete. The GPU resets it."""
    count: Tensor
    """int32 [1]: number of listed pairs."""
    n_rows: Tensor
    """int32 [1]: token rows of the batch; `out_RD` is written for all of them."""
    rows_P: Tensor
    """int32: the token row of each pair."""
    experts_P: Tensor
    """int32: the expert of each pair if it is missing; -1 if it is on the device."""
    weights_P: Tensor
    """float32: the routing weight of each pair."""
    x_RD: Tensor
    out_RD: Tensor
    """float32: the weighted sum over the missing experts of each row; zero for rows without missing
    experts."""
    ahead_N: Tensor
    """int32: experts that a later layer will miss, as layer * experts + expert, or -1. The thread
    loads them into the caches of the CPU, or from disk."""
    ahead_count: Tensor
    """int32 [1]: number of experts listed in `ahead_N`, or 0. The thread resets it."""


class RecordSource(Protocol):
    """Source of records on disk: gives their experts places in host memory, into which they are
    read."""

    @property
    def file(self) -> int:
        """Descriptor of the file with the records."""

    def hold(self, layer: int, experts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the address of the record of each of these experts, valid until `release`, and the
        offset in the file from which it must be read first; or PRESENT, or ARRIVING until
        `end_reads` returns, as in tiers.ssd."""

    def expect(self, layer: int, experts: Sequence[int]) -> list[tuple[int, int]]:
        """Prepare reads of experts that a layer after that of `hold` is likely to need. Return the
        address of the record of each, and the offset in the file from which it is to be read; or
        PRESENT if it is not to be read."""

    def end_ahead(self, layer: int, expert: int, error: int) -> None:
        """Note that a read of `expect` has ended, with an error as in `end_reads`. Called by
        another thread."""

    def learn(self) -> None:
        """Update the statistics of the use of experts while records are read."""

    def end_reads(self, failed: int, error: int) -> None:
        """Note that the reads of `hold` have ended; called unless all records were present. `error`
        is 0, or an `errno` or -1 for the end of the file, and `failed` the index of the expert that
        could not be read. After an error `release` is not called."""

    def release(self) -> None:
        """Release the records of `hold`, which are not used any more."""


class MissSpan(NamedTuple):
    """Times of one request: begin and end as time.perf_counter_ns()."""

    layer: int
    begin: int
    end: int
    n_experts: int


class MissRunner:
    """Thread that computes missing experts, and its buffers. It spins while requests come, looks at
    the flags every 40 µs after 2 ms without one, and sleeps while it is paused, as it is at first.

    `inject("cpu")` is for fault-injection tests. Native threads call it at the start of each
    request and before each task; it may sleep. An exception that it raises is stored.
    """

    _handle: int | None = None  # of an object whose __init__ has failed

    def __init__(
        self,
        shape: ExpertShape,
        dtype: torch.dtype,
        n_layers: int,
        n_experts: int,
        max_rows: int,
        top_k: int,
        threads: int,
        pinned: bool,
        inject: Callable[[str], object] | None = None,
        sync: WorkerSync | None = None,
        activation: Activation | None = None,
        source: RecordSource | None = None,
        format: WeightFormat | None = None,
        ranks: LowRanks = NO_LOW_RANKS,
    ) -> None:
        """`threads` includes the runner's own. `check` also raises failures of `sync`, and of
        `source`, which is asked for the records of each request instead of `set_records`. `format`
        is the layout of packed records; `ranks` are the ranks of low-rank matrices in records."""
        self._formats = layer_formats(format, n_layers)
        reason = why_unsupported(dtype, shape, activation, self._formats)
        if reason is not None:
            raise ConfigError(f"the CPU cannot compute missing experts: {reason}")
        self._process = os.getpid()
        self._closed = False
        self._library = loaded_library()
        self._sync = sync
        self._failures: list[BaseException] = []
        assert min(n_layers, n_experts, max_rows, top_k) >= 1
        pairs = max_rows * top_k
        self._parts: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
            ((n_layers,), torch.int32),
            ((n_layers,), torch.int32),
            ((1,), torch.int32),
            ((1,), torch.int32),
            ((pairs,), torch.int32),
            ((pairs,), torch.int32),
            ((pairs,), torch.float32),
            ((max_rows, shape.d_model), dtype),
            ((max_rows, shape.d_model), torch.float32),
            ((max(pairs, n_experts),), torch.int32),
            ((1,), torch.int32),
        )
        self._n_layers, self._n_experts = n_layers, n_experts
        size = sum(_line_bytes(*part) for part in self._parts)
        self._slab = HostSlab("missing experts", 1, round_up(size, ALIGN), pinned)
        self.memory = self._slab[0]
        """Bytes of all buffers."""
        self.host = self.view(self.memory)
        """Buffers as the host sees them."""
        self.host.ahead_count.zero_()
        # Kept here: the native threads call it until close(). It must not refer to this object.
        self._callback = inject_callback(inject, self._failures)
        self._fetch = None if source is None else _FETCH(partial(_fetch, source, self._failures))
        tensors = [getattr(self.host, field.name) for field in fields(MissBuffers)]
        addresses = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        layout = RecordLayout(shape, dtype, format=format, ranks=ranks)
        records = [layout.weight_bytes_in(layer) for layer in range(n_layers)]
        record_bytes = (ctypes.c_int64 * n_layers)(*records)
        numbers = n_layers, n_experts, max_rows, top_k, SPIN_NS, ctypes.addressof(record_bytes)
        sizes = (ctypes.c_int64 * len(numbers))(*numbers)
        form = form_of(activation, shape.gated)
        like = self._formats[0] if self._formats else None
        rows = self.host.x_RD, self.host.x_RD
        low_rank = layout.low_rank
        args = group_args(*rows, [], shape, threads, form=form, format=like, low_rank=low_rank)
        self._natives = native_formats(self._formats)
        callbacks = self._callback, self._fetch
        others = self._natives, *callbacks
        self._handle = self._library.overspill_misses_new(args, addresses, sizes, *others)

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes

    def view(self, memory: Tensor) -> MissBuffers:
        """Return the buffers in `memory`; for the device, pass `on_device(runner.memory, device)`.
        They are valid until close()."""
        tensors, at = [], 0
        for shape, dtype in self._parts:
            size = math.prod(shape) * dtype.itemsize
            tensors.append(memory[at : at + size].view(dtype).view(shape))
            at += _line_bytes(shape, dtype)
        return MissBuffers(*tensors)

    def set_records(self, layer: int, addresses: Sequence[int]) -> None:
        """Set the addresses of the records of a layer's experts; 0 for an expert that is not in
        host memory. Call it only while no step runs. The caller keeps the memory."""
        if not 0 <= layer < self._n_layers or len(addresses) != self._n_experts:
            raise ValueError(
                f"{len(addresses)} addresses for layer {layer}; the model has {self._n_layers} "
                f"layers of {self._n_experts} experts"
            )
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._library.overspill_misses_set_records(self._open(), layer, pointers)

    def resume(self) -> None:
        """Wake the thread. Call it before each step, so that the thread is awake when the step
        needs it."""
        self._library.overspill_misses_resume(self._open())

    def pause(self) -> None:
        """Let the threads sleep, because no step follows for a while. A request would still be
        computed, 10 ms late."""
        self._library.overspill_misses_pause(self._own())

    def check(self) -> None:
        """Raise a stored failure, once. The request that failed is done, but its results may be
        zeros."""
        if self._sync is not None:
            with self._sync.lock:
                self._sync.raise_error()
        message = ctypes.create_string_buffer(256)
        self._library.overspill_misses_failure(self._own(), message, len(message))
        raise_first(self._failures)
        if message.value:
            raise EngineError(
                f"the CPU could not compute missing experts: {message.value.decode()}. Please "
                "report this as a bug"
            )

    @property
    def n_misses(self) -> int:
        """Number of experts computed so far; an expert with several token rows of a step counts
        once."""
        return self._counts()[0]

    @property
    def seconds(self) -> float:
        """Seconds spent computing missing experts."""
        return self._counts()[1] / 1e9

    def take_spans(self) -> list[MissSpan]:
        """Return the requests since the last call, the latest 4096 at most. A request that has just
        set its flag may not be among them yet."""
        numbers = (ctypes.c_int64 * (len(MissSpan._fields) * _MAX_SPANS))()
        count = self._library.overspill_misses_spans(self._own(), numbers)
        flat = iter(numbers[: len(MissSpan._fields) * count])
        return [MissSpan(*span) for span in zip(flat, flat, flat, flat, strict=True)]

    def close(self) -> None:
        """End the thread after the requests that are ready, and release the buffers. No step may
        run, and none may follow."""
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            self._library.overspill_misses_close(self._handle)
            self._slab.close()

    def __del__(self) -> None:
        # here and not in close(): another thread may still use the native object
        if self._handle is not None and os.getpid() == self._process:
            self.close()
            self._library.overspill_misses_free(self._handle)

    @property
    def n_loaded(self) -> int:
        """Number of experts that were loaded into the caches before they were needed."""
        return self._counts()[2]

    def _counts(self) -> tuple[int, int, int]:
        counts = (ctypes.c_int64 * 3)()
        self._library.overspill_misses_counts(self._own(), counts)
        n_experts, ns, n_loaded = counts
        return n_experts, ns, n_loaded

    def _own(self) -> int | None:
        """Return the handle. Raises in a forked child, which does not have the thread; the lock may
        be held there."""
        if os.getpid() != self._process:
            raise EngineError("missing experts are computed in another process; load the model")
        return self._handle

    def _open(self) -> int | None:
        if self._closed:
            raise EngineError("the thread for missing experts was closed; load the model again")
        return self._own()


def _line_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor, in whole cache lines."""
    return round_up(math.prod(shape) * dtype.itemsize, _CACHE_LINE)


def _fetch(
    source: RecordSource,
    failures: list[BaseException],
    what: int,
    first: int,
    second: int,
    experts: int,
    addresses: int,
    offsets: int,
) -> int:
    """Call a method of `source` for the native thread. `first` and `second` are a layer and a
    number of experts, or the arguments of `end_reads`. Returns the file, or -1 after a failure."""
    pause_collection()
    try:
        if what == _RELEASE:
            source.release()
        elif what == _LEARN:
            source.learn()
        elif what == _END_READS:
            source.end_reads(first, second)
        elif what == _END_AHEAD:
            source.end_ahead(first, ctypes.c_int32.from_address(experts).value, second)
        else:
            ask = source.expect if what == _EXPECT else source.hold
            ids = (ctypes.c_int32 * second).from_address(experts)
            pointers = (ctypes.c_void_p * second).from_address(addresses)
            numbers = (ctypes.c_int64 * second).from_address(offsets)
            for place, found in enumerate(ask(first, ids[:])):
                pointers[place], numbers[place] = found
        return source.file
    except BaseException as error:
        failures.append(error)
        return -1
    finally:
        resume_collection()
