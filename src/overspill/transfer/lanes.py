"""Lanes and marks: a CUDA stream and its events, or their twins on a CPU, where a copy is done
when the call returns. All waiting between compute and copies is written in these two words."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from overspill.trace.recorder import Recorder

Inject = Callable[[str], None]
"""Called before every transfer and optimizer job with its kind: tests delay or fail jobs here."""


class Mark:
    """A point on a lane. Without an event (on a CPU) it has always passed."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
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
        context: AbstractContextManager[object] = nullcontext()
        if self.stream is not None:
            context = torch.cuda.stream(self.stream)
        with context:
            for mark in after:
                if mark.event is not None and self.stream is not None:
                    self.stream.wait_event(mark.event)
            if self.inject is not None:
                self.inject(self.row)
            if self.stream is None:
                with self.recorder.span(self.row, name, size):
                    for destination, source in pairs:
                        destination.copy_(source)
                return PASSED
            traced = self.recorder.enabled
            start = torch.cuda.Event(enable_timing=True) if traced else None
            if start is not None:
                start.record(self.stream)
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            # blocking=True: a thread that waits sleeps instead of burning an optimizer core
            end = torch.cuda.Event(enable_timing=traced, blocking=True)
            end.record(self.stream)
            if start is not None:
                self.recorder.device_span(self.row, name, start, end, size)
            return Mark(end)


def compute_mark(device: torch.device) -> Mark:
    """Where the current compute stream stands now."""
    if device.type != "cuda":
        return PASSED
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return Mark(event)


def compute_waits(device: torch.device, mark: Mark) -> None:
    """Makes the current compute stream (not another, and not the host) wait for `mark`."""
    if mark.event is not None:
        torch.cuda.current_stream(device).wait_event(mark.event)
