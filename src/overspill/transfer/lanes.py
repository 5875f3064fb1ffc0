"""Lanes and marks: a CUDA stream and its events, or their twins on a CPU, where a copy is done
when the call returns. All waiting between compute and copies is written in these two words."""

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from overspill.trace.recorder import Recorder
from overspill.transfer.driver import Event, copy_on, new_event

Inject = Callable[[str], None]
"""Called before every transfer and optimizer job with its kind: tests delay or fail jobs here."""


class Mark:
    """A point on a lane. Without an event (on a CPU) it has always passed."""

    __slots__ = ("event",)

    def __init__(self, event: Event | None = None) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Blocks the calling thread until the lane has passed the mark."""
        if self.event is not None:
            self.event.synchronize()


PASSED = Mark()


class Lane:
    """One direction of copies, in order. The lane named "compute" is torch's current stream."""

    def __init__(self, row: str, device: torch.device, recorder: Recorder, inject: Inject | None):
        self.row = row
        self.recorder = recorder
        self.inject = inject
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], name: str, after: Iterable[Mark] = ()
    ) -> Mark:
        """Copies (destination, source) pairs once `after` has passed; the mark is their end."""
        size = sum(source.nbytes for _, source in pairs)
        self.recorder.add_bytes(self.row, size)
        stream = self.stream
        if stream is None:
            if self.inject is not None:
                self.inject(self.row)
            with self.recorder.span(self.row, name, size):
                for destination, source in pairs:
                    destination.copy_(source)
            return PASSED
        for mark in after:
            if mark.event is not None:
                mark.event.wait(stream)
        if self.inject is not None:
            with torch.cuda.stream(stream):  # it may put a delay there
                self.inject(self.row)
        traced = self.recorder.enabled
        start = torch.cuda.Event(enable_timing=True) if traced else None
        if start is not None:
            start.record(stream)
        for destination, source in pairs:
            copy_on(stream, destination, source)
        if start is not None:
            stop = torch.cuda.Event(enable_timing=True)
            stop.record(stream)
            self.recorder.device_span(self.row, name, start, stop, size)
        # a thread that waits for it must not burn an optimizer core
        end = new_event(stream.device, blocking=True)
        end.record(stream)
        return Mark(end)


def compute_mark(device: torch.device, spin: bool = False) -> Mark:
    """Where the current compute stream stands now. Who waits for it sleeps, or with `spin`, where
    it will be short, does not."""
    if device.type != "cuda":
        return PASSED
    event = new_event(device, blocking=not spin)
    event.record(torch.cuda.current_stream(device))
    return Mark(event)


def compute_waits(device: torch.device, mark: Mark) -> None:
    """Makes the current compute stream (not another, and not the host) wait for `mark`."""
    if mark.event is not None:
        mark.event.wait(torch.cuda.current_stream(device))


def to_host(tensor: Tensor) -> Tensor:
    """A few numbers of the compute stream, once they are known. Through pinned memory and an event
    of our own; what a blocking copy holds while it waits is the driver's secret."""
    if tensor.device.type != "cuda":
        return tensor
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor, non_blocking=True)
    compute_mark(tensor.device, spin=True).wait()
    return there


class Stamp:
    """When the current compute stream came past here; on a CPU, when it was made."""

    __slots__ = ("_event", "_seconds")

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def until(self, later: "Stamp") -> float:
        """Seconds to another that the stream has passed too."""
        if self._event is not None and later._event is not None:
            return float(self._event.elapsed_time(later._event)) / 1e3
        return later._seconds - self._seconds
