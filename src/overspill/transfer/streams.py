"""Copy streams and their events: CUDA streams, or their CPU counterparts, where a copy has ended
when the call returns unless it is deferred. All waiting between compute and copies is expressed
with these."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from overspill.trace.recorder import Recorder
from overspill.transfer.driver import Event, copy_on, current_stream, new_event

Defer = Callable[[Callable[[], None]], Event]
"""Carries out a copy later, after the copies it got before, and returns its end."""

Inject = Callable[[str], Defer | None]
"""Called before every transfer, CPU task and optimizer job with its kind. Fault-injection tests
sleep or raise here. On a CPU, where a copy has otherwise ended when the call returns, they may
defer it."""


class StreamEvent:
    """A point on a stream. Without an event (on a CPU) it has always completed."""

    __slots__ = ("event",)

    def __init__(self, event: Event | None = None) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Block the calling thread until the stream has reached this point."""
        if self.event is not None:
            self.event.synchronize()


COMPLETED = StreamEvent()


class _All:
    """The last of several events."""

    def __init__(self, events: Sequence[StreamEvent]) -> None:
        self._events = events

    def query(self) -> bool:
        return all(event.done() for event in self._events)

    def synchronize(self) -> None:
        for event in self._events:
            event.wait()

    def record(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("it was recorded")

    def wait(self, stream: torch.cuda.Stream) -> None:
        for event in self._events:
            if event.event is not None:
                event.event.wait(stream)


def all_of(events: Sequence[StreamEvent]) -> StreamEvent:
    """Return an event that completes when all of `events` have."""
    return events[0] if len(events) == 1 else StreamEvent(_All(events))


class CopyStream:
    """Copies in one direction, in order. `name` is their lane in the trace."""

    def __init__(self, name: str, device: torch.device, recorder: Recorder, inject: Inject | None):
        self.name = name
        self.recorder = recorder
        self.inject = inject
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._deferred = COMPLETED  # the end of the last copy on a CPU

    def run_inject(self) -> Defer | None:
        """Call the fault injection, if there is any, with this stream as the current one."""
        if self.inject is None:
            return None
        if self.stream is None:
            return self.inject(self.name)
        with torch.cuda.stream(self.stream):  # it may put a delay there
            return self.inject(self.name)

    def copy(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        label: str,
        after: Iterable[StreamEvent] = (),
        counter: str | None = None,
    ) -> StreamEvent:
        """Copy (destination, source) pairs after the given events; return the end event. The
        bytes are counted as `counter`, by default under the name of this stream."""
        size = sum(source.nbytes for _, source in pairs)
        self.recorder.add_bytes(counter or self.name, size)
        stream = self.stream
        if stream is None:
            copy = partial(self._copy_on_cpu, pairs, label, size)
            defer = self.run_inject()
            if defer is not None:
                self._deferred = StreamEvent(defer(copy))
                return self._deferred
            copy()
            return COMPLETED
        for event in after:
            if event.event is not None:
                event.event.wait(stream)
        self.run_inject()
        traced = self.recorder.enabled
        start = torch.cuda.Event(enable_timing=True) if traced else None
        if start is not None:
            start.record(stream)
        for destination, source in pairs:
            copy_on(stream, destination, source)
        if start is not None:
            stop = torch.cuda.Event(enable_timing=True)
            stop.record(stream)
            self.recorder.device_span(self.name, label, start, stop, size)
        # blocking: a thread that waits for it must not use a core that the optimizer needs
        end = new_event(stream.device, blocking=True)
        end.record(stream)
        return StreamEvent(end)

    def synchronize(self) -> None:
        """Block until the device has carried out everything, on a CPU these copies."""
        if self.stream is not None:
            torch.cuda.synchronize(self.stream.device)
        self._deferred.wait()

    def _copy_on_cpu(self, pairs: Sequence[tuple[Tensor, Tensor]], label: str, size: int) -> None:
        with self.recorder.span(self.name, label, size):
            for destination, source in pairs:
                destination.copy_(source)


def record_event(device: torch.device, spin: bool = False) -> StreamEvent:
    """Record an event on the current compute stream. A thread that waits for it sleeps, or with
    `spin`, for short waits, polls."""
    if device.type != "cuda":
        return COMPLETED
    event = new_event(device, blocking=not spin)
    event.record(current_stream(device))
    return StreamEvent(event)


def wait_event(device: torch.device, event: StreamEvent) -> None:
    """Make the current compute stream, not the host, wait for `event`. On a CPU the calling thread
    computes, so it waits."""
    if device.type != "cuda":
        event.wait()
    elif event.event is not None:
        event.event.wait(current_stream(device))


class HostCopy:
    """A small tensor of the compute stream on its way to pinned memory."""

    __slots__ = ("_copy", "_end")

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        if tensor.device.type == "cuda":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
        self._end = record_event(tensor.device, spin=True)

    def wait(self) -> Tensor:
        """Block the calling thread until the tensor has arrived, and return it."""
        self._end.wait()
        return self._copy


def to_host(tensor: Tensor) -> Tensor:
    """Copy a small tensor of the compute stream to pinned memory and wait for it."""
    return HostCopy(tensor).wait()


class Timestamp:
    """The time at which the current compute stream reaches this point; on a CPU, now."""

    __slots__ = ("_event", "made")

    def __init__(self, device: torch.device) -> None:
        self.made = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(current_stream(device))

    def passed(self) -> bool:
        """Whether the stream has reached this point."""
        return self._event is None or self._event.query()

    def seconds_until(self, later: "Timestamp") -> float:
        """Seconds between two timestamps that the stream has passed."""
        if self._event is not None and later._event is not None:
            return float(self._event.elapsed_time(later._event)) / 1e3
        return later.made - self.made
