"""A stream beside the compute stream, for exchanges and copies of token rows."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.trace.recorder import Recorder
from overspill.transfer.driver import new_event
from overspill.transfer.streams import COMPLETED, Inject, StreamEvent, wait_event


class WorkStream:
    """Stream beside the compute stream, whose work is carried out in order. On a CPU the work has
    ended when the call returns, unless fault injection defers it."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        recorder: Recorder | None = None,
        inject: Inject | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.recorder = recorder
        self.inject = inject
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # small kernels of transfers must not queue behind the blocks of a matrix product
            self.stream = torch.cuda.Stream(device, priority=-1)

    def run(
        self,
        work: Callable[[], None],
        after: Iterable[StreamEvent] = (),
        label: str = "",
        size: int = 0,
    ) -> StreamEvent:
        """Queue `work`, which starts when the events have completed; return its end. On a GPU the
        work must use `stream`: entering it takes as long as a transfer's launches."""
        stream = self.stream
        if stream is None:
            for event in after:
                event.wait()
            defer = None if self.inject is None else self.inject(self.name)
            if defer is not None:
                return StreamEvent(defer(work))
            if self.recorder is None:
                work()
                return COMPLETED
            with self.recorder.span(self.name, label, size):
                work()
            return COMPLETED
        for event in after:
            if event.event is not None:
                event.event.wait(stream)
        if self.inject is not None:
            with torch.cuda.stream(stream):  # it may put a delay there
                self.inject(self.name)
        return self._timed(stream, work, label, size)

    def entered(self) -> AbstractContextManager[object]:
        """Make the stream the current one, for work that torch queues."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _timed(
        self, stream: torch.cuda.Stream, work: Callable[[], None], label: str, size: int
    ) -> StreamEvent:
        if self.recorder is None or not self.recorder.enabled:
            work()
        else:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            work()
            stop.record(stream)
            self.recorder.device_span(self.name, label, start, stop, size)
        end = new_event(self.device, blocking=True)
        end.record(stream)
        return StreamEvent(end)


@dataclass(eq=False)
class Arrival:
    """A tensor on its way through another stream.

    The tensors on the device were allocated for the compute stream. They are held here until that
    stream has waited for the end of the transfer, so no other work gets their memory before.
    """

    device: torch.device
    result: Tensor
    end: StreamEvent = COMPLETED
    source: Tensor | None = None

    def wait(self) -> Tensor:
        """Make the compute stream wait for the transfer; return the result."""
        if self.source is not None:
            wait_event(self.device, self.end)
            self.source = None
        return self.result
