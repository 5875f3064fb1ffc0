"""Who was busy when: spans on named rows, and byte counters.

A host span is timed with the host's clock. A span on a GPU stream is given as two events, which
the GPU passes later; `collect` turns those it has passed into spans on the host's clock.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from overspill.trace.spans import ROWS, Span, busy_shares

if TYPE_CHECKING:
    import torch

__all__ = ["ROWS", "Recorder", "Span"]

_REALIGN_NS = 5_000_000_000


class _Base(NamedTuple):
    """One moment on both clocks: the GPU passed `event` when the host's clock showed `host_ns`."""

    event: "torch.cuda.Event"
    host_ns: int


class _Pending(NamedTuple):
    """A device span whose end the GPU had not reached when it was last looked at."""

    row: str
    name: str
    start: "torch.cuda.Event"
    end: "torch.cuda.Event"
    bytes: int
    base: _Base


class Recorder:
    """Keeps the newest `capacity` spans; any thread may call any method.

    Off (the default), `span` and `device_span` store nothing and cost next to nothing; counters
    count always.
    """

    def __init__(self, capacity: int = 200_000, device: "torch.device | None" = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1 span")
        self.enabled = False
        self._device = device  # whose clock device spans are on; None: the current one
        # Guards all below: worker threads add spans while the main thread reads them.
        self._lock = threading.Lock()
        # Each with the time it was kept. That time only grows along the deque and is not before
        # the span's end, so `busy` can stop early without missing one.
        self._kept: deque[tuple[int, Span]] = deque(maxlen=capacity)
        self._pending: deque[_Pending] = deque(maxlen=capacity)
        self._counters: dict[str, int] = {}
        self._sources: list[Callable[[], None]] = []
        self._stopped_ns = 0
        self._base: _Base | None = None
        self._clock_stream: torch.cuda.Stream | None = None

    def add_source(self, tell: Callable[[], None]) -> None:
        """`tell` is called before anybody reads: it adds what was timed or counted elsewhere."""
        self._sources.append(tell)

    def remove_source(self, tell: Callable[[], None]) -> None:
        """Asks it a last time; nothing if it is none."""
        if tell in self._sources:
            tell()
            self._sources.remove(tell)

    def start(self) -> None:
        """Record from now on. The first device span, or a GPU in use already, sets the clocks."""
        import torch

        # Asking for `is_initialized` does not start CUDA: a run on the CPU must not take a context.
        if torch.cuda.is_initialized():
            self._align()
        self.enabled = True

    def stop(self) -> None:
        """Record no more; what is open or on its way through the GPU is still kept."""
        self.enabled = False
        self._stopped_ns = time.perf_counter_ns()

    def clear(self) -> None:
        """Forget all spans; counters stay."""
        self._ask_sources()  # what they would tell later is of the past too
        with self._lock:
            self._kept.clear()
            self._pending.clear()

    def span(self, row: str, name: str, bytes: int = 0) -> AbstractContextManager[object]:
        """Times its body on the host's clock."""
        return _HostSpan(self, row, name, bytes) if self.enabled else _NOTHING

    def host_span(self, row: str, name: str, start_ns: int, bytes: int = 0) -> None:
        """From `start_ns` (time.perf_counter_ns) until now, where a body is no block of code."""
        if self.enabled:
            self._keep_host(row, name, start_ns, bytes)

    def past_span(self, row: str, name: str, start_ns: int, end_ns: int, bytes: int = 0) -> None:
        """Something that was timed elsewhere, by the same clock, while the recorder was on: it may
        have been stopped since."""
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
        """What a stream does between two events, both recorded and made with enable_timing=True.

        The events are the recorder's from here on: recorded again, they would tell another time.
        """
        if not self.enabled:
            return
        base = self._base or self._align()
        with self._lock:
            self._pending.append(_Pending(row, name, start_event, end_event, bytes, base))

    def add_bytes(self, counter: str, n: int) -> None:
        with self._lock:
            self._counters[counter] = self._counters.get(counter, 0) + n

    def counters(self) -> dict[str, int]:
        """A copy of the byte counters, counted since the recorder was made."""
        self._ask_sources()
        with self._lock:
            return dict(self._counters)

    def collect(self) -> int:
        """Resolve the device spans that have ended, without waiting; how many are still open."""
        self._ask_sources()
        with self._lock:
            # Taken out, so that two threads never resolve the same span, and that querying many
            # events holds up nobody.
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
            self._align()
        return still

    def spans(self) -> list[Span]:
        """All spans that are kept, by their start."""
        self.collect()
        with self._lock:
            kept = [span for _, span in self._kept]
        return sorted(kept, key=lambda span: (span.start_ns, span.end_ns))

    def busy(self, since_ns: int, until_ns: int) -> dict[str, float]:
        """The share of that time in which each row had a span; overlaps count once.

        Every row of `ROWS` is there, with 0.0 if nothing ran on it.
        """
        self.collect()
        recent = []
        with self._lock:
            for kept_ns, span in reversed(self._kept):
                if kept_ns < since_ns:
                    break
                recent.append(span)
        return busy_shares(recent, since_ns, until_ns)

    def _ask_sources(self) -> None:
        for tell in list(self._sources):
            tell()

    def _keep_host(self, row: str, name: str, start_ns: int, bytes: int) -> None:
        with self._lock:
            # Read inside the lock, so that the times along the deque only grow.
            end_ns = time.perf_counter_ns()
            self._kept.append((end_ns, Span(row, name, start_ns, end_ns, bytes)))

    def _align(self) -> _Base:
        """Take one moment on both clocks, again from time to time.

        The two clocks drift, and `elapsed_time` is a 32-bit float that loses microseconds after a
        minute. The event goes to a stream of its own, behind nothing, so no work is waited for.
        """
        import torch

        stream = self._clock_stream or torch.cuda.Stream(self._device)
        self._clock_stream = stream
        event = torch.cuda.Event(enable_timing=True)
        stream.synchronize()
        before_ns = time.perf_counter_ns()
        event.record(stream)
        event.synchronize()
        base = _Base(event, (before_ns + time.perf_counter_ns()) // 2)
        self._base = base
        return base


class _HostSpan:
    __slots__ = ("_bytes", "_name", "_recorder", "_row", "_start_ns")

    def __init__(self, recorder: Recorder, row: str, name: str, bytes: int) -> None:
        self._recorder = recorder
        self._row = row
        self._name = name
        self._bytes = bytes

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._recorder._keep_host(self._row, self._name, self._start_ns, self._bytes)


_NOTHING: AbstractContextManager[object] = nullcontext()  # one for all: it holds no state


def _resolve(pending: _Pending) -> Span:
    start_ms = pending.base.event.elapsed_time(pending.start)
    # The length from its own two events: the difference of two long times would be less exact.
    length_ms = pending.start.elapsed_time(pending.end)
    start_ns = pending.base.host_ns + round(start_ms * 1e6)
    end_ns = start_ns + max(0, round(length_ms * 1e6))
    return Span(pending.row, pending.name, start_ns, end_ns, pending.bytes)
