"""Records spans of time on named rows, and byte counters.

A host span is timed with the host's clock. A span on a GPU stream is given as two events; when they
have completed, `collect` converts them to the host's clock.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from overspill.trace.spans import COMPUTE, ROWS, Span, busy_shares

if TYPE_CHECKING:
    import torch

__all__ = ["ROWS", "Recorder", "Span"]

_REALIGN_NS = 5_000_000_000


class ClockBase(NamedTuple):
    """One moment on both clocks: `event` completed at `host_ns` of the host's clock."""

    event: "torch.cuda.Event"
    host_ns: int


class _PendingSpan(NamedTuple):
    """Span on a device stream that may not have ended."""

    row: str
    name: str
    start: "torch.cuda.Event"
    end: "torch.cuda.Event"
    bytes: int
    base: ClockBase


class Recorder:
    """Store of the newest `capacity` spans, and byte counters. Thread-safe.

    Spans are recorded between `start` and `stop` only; counters always count.
    """

    def __init__(
        self,
        capacity: int = 200_000,
        device: "torch.device | None" = None,
        read_clocks: Callable[[], ClockBase] | None = None,
    ) -> None:
        """`read_clocks` gives one moment on both clocks; by default of the current CUDA device, or
        of `device`."""
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1 span")
        self.enabled = False
        self._device = device
        self._read_clocks = read_clocks or GpuClock(device).read
        # Guards the fields below: worker threads add spans while the main thread reads.
        self._lock = threading.Lock()
        # Each with the time it was added. That time only grows along the deque and is not before
        # the span's end, so `busy` can stop early.
        self._kept: deque[tuple[int, Span]] = deque(maxlen=capacity)
        self._pending: deque[_PendingSpan] = deque(maxlen=capacity)
        self._counters: dict[str, int] = {}
        self._sources: list[Callable[[], None]] = []
        self._stopped_ns = 0
        self._base: ClockBase | None = None

    def add_source(self, source: Callable[[], None]) -> None:
        """Call `source` before each read, so that it can add spans and counts that were measured
        elsewhere."""
        self._sources.append(source)

    def remove_source(self, source: Callable[[], None]) -> None:
        """Call `source` a last time, and no more; no-op if unknown."""
        if source in self._sources:
            source()
            self._sources.remove(source)

    def start(self) -> None:
        """Starts recording, and aligns the clocks if the GPU is in use already."""
        import torch

        # is_initialized() does not create a CUDA context
        if torch.cuda.is_initialized():
            self._base = self._read_clocks()
        self.enabled = True

    def stop(self) -> None:
        """Stops recording; spans that have begun are still kept."""
        self.enabled = False
        self._stopped_ns = time.perf_counter_ns()

    def clear(self) -> None:
        """Remove all spans, also those that sources have not added yet. Counters stay."""
        self._read_sources()
        with self._lock:
            self._kept.clear()
            self._pending.clear()

    def span(self, row: str, name: str, bytes: int = 0) -> AbstractContextManager[object]:
        """Times its body on the host's clock."""
        return self._timed(row, name, bytes) if self.enabled else _NO_SPAN

    @contextmanager
    def _timed(self, row: str, name: str, bytes: int) -> Iterator[None]:
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:  # also if the recorder was stopped meanwhile
            self._keep_host(row, name, start_ns, bytes)

    def host_span(self, row: str, name: str, start_ns: int, bytes: int = 0) -> None:
        """A span from `start_ns` (of time.perf_counter_ns) until now."""
        if self.enabled:
            self._keep_host(row, name, start_ns, bytes)

    def past_span(self, row: str, name: str, start_ns: int, end_ns: int, bytes: int = 0) -> None:
        """A span that was timed elsewhere by the same clock, and began while recording."""
        if not self.enabled and start_ns > self._stopped_ns:
            return
        with self._lock:
            now = time.perf_counter_ns()
            self._kept.append((now, Span(row, name, start_ns, end_ns, bytes)))

    def device_span(
        self,
        row: str,
        name: str,
        start_event: "torch.cuda.Event",
        end_event: "torch.cuda.Event",
        bytes: int = 0,
    ) -> None:
        """Add a span on a stream between two recorded events with enable_timing=True, which must
        not be recorded again."""
        if not self.enabled:
            return
        if self._base is None:
            self._base = self._read_clocks()
        base = self._base
        with self._lock:
            self._pending.append(_PendingSpan(row, name, start_event, end_event, bytes, base))

    def mark(self, name: str) -> None:
        """Add a span without length on the row of the device that computes, at the time when it has
        completed all work that is queued now."""
        import torch

        if not self.enabled:
            return
        on_cpu = self._device is not None and self._device.type == "cpu"
        if torch.cuda.is_initialized() and not on_cpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self.device_span(COMPUTE, name, event, event)
        else:
            self.host_span(COMPUTE, name, time.perf_counter_ns())

    def add_bytes(self, counter: str, n: int) -> None:
        with self._lock:
            self._counters[counter] = self._counters.get(counter, 0) + n

    def counters(self) -> dict[str, int]:
        """A copy of the byte counters."""
        self._read_sources()
        with self._lock:
            return dict(self._counters)

    def total_bytes(self) -> int:
        """The sum of the byte counters, without the counts that sources have not added yet: it
        waits for no other thread."""
        with self._lock:
            return sum(self._counters.values())

    def collect(self) -> int:
        """Convert the device spans that have ended, without waiting. Return the number of spans
        that have not."""
        self._read_sources()
        with self._lock:
            # taken out: no two threads convert the same span, and events are queried without lock
            waiting = list(self._pending)
            self._pending.clear()
        ended, open_still = [], []
        for pending in waiting:
            if pending.end.query() and pending.start.query():
                ended.append(_resolve(pending))
            else:
                open_still.append(pending)
        with self._lock:
            room = (self._pending.maxlen or 0) - len(self._pending)
            newest = open_still[-room:] if room > 0 else []
            self._pending.extendleft(reversed(newest))
            now = time.perf_counter_ns()
            self._kept.extend((now, span) for span in ended)
            still = len(self._pending)
        if self._base is not None and now - self._base.host_ns > _REALIGN_NS:
            self._base = self._read_clocks()
        return still

    def spans(self) -> list[Span]:
        """All spans, sorted by start."""
        self.collect()
        with self._lock:
            kept = [span for _, span in self._kept]
        return sorted(kept, key=lambda span: (span.start_ns, span.end_ns))

    def busy(self, since_ns: int, until_ns: int) -> dict[str, float]:
        """The share of a period that the spans of each row cover, 0.0 for an idle row of `ROWS`."""
        self.collect()
        recent = []
        with self._lock:
            for kept_ns, span in reversed(self._kept):
                if kept_ns < since_ns:
                    break
                recent.append(span)
        return busy_shares(recent, since_ns, until_ns)

    def _read_sources(self) -> None:
        for source in list(self._sources):
            source()

    def _keep_host(self, row: str, name: str, start_ns: int, bytes: int) -> None:
        with self._lock:
            # read with the lock, so that the times along the deque only grow
            end_ns = time.perf_counter_ns()
            self._kept.append((end_ns, Span(row, name, start_ns, end_ns, bytes)))


class GpuClock:
    """Aligned readings of both clocks, renewed from time to time: the clocks drift, and
    `elapsed_time` is a 32-bit float that loses microseconds after a minute."""

    def __init__(self, device: "torch.device | None") -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def read(self) -> ClockBase:
        import torch

        # a separate stream, so that the event does not wait for any work
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        event = torch.cuda.Event(enable_timing=True)
        stream.synchronize()
        before_ns = time.perf_counter_ns()
        event.record(stream)
        event.synchronize()
        return ClockBase(event, (before_ns + time.perf_counter_ns()) // 2)


_NO_SPAN: AbstractContextManager[object] = nullcontext()


def _resolve(pending: _PendingSpan) -> Span:
    start_ms = pending.base.event.elapsed_time(pending.start)
    # from its own two events: the difference of two long times would be less exact
    length_ms = pending.start.elapsed_time(pending.end)
    start_ns = pending.base.host_ns + round(start_ms * 1e6)
    end_ns = start_ns + max(0, round(length_ms * 1e6))
    return Span(pending.row, pending.name, start_ns, end_ns, pending.bytes)
