"""An exchange of one process with itself, to measure pipelines on one GPU.

Token rows are copied to pinned host memory and back by the copy engines. With a rate, a transfer
takes at least the time that its bytes need at this rate, from the end of the one before or from the
time at which its rows are there: a kernel of one thread waits for the rest of it.
"""

import time
from functools import partial

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.parallel.exchange.interface import Exchange, Transfer
from overspill.trace.recorder import Recorder
from overspill.transfer.driver import current_stream, new_event
from overspill.transfer.host_link import HostLink
from overspill.transfer.streams import Inject, StreamEvent
from overspill.transfer.work_stream import WorkStream


class _HostBuffer:
    """Pinned memory that a transfer passes through."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = device.type == "cuda"
        self.free = new_event(device, blocking=True) if self._pinned else None
        """When the last transfer has left the memory."""

    def of(self, size: int) -> Tensor:
        if len(self._memory) < size:
            if self.free is not None:
                self.free.synchronize()  # a transfer uses the memory that is replaced
            with torch.inference_mode(False):  # later passes may train
                grown = size + size // 4
                self._memory = torch.empty(grown, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory


class LoopbackExchange(Exchange):
    def __init__(
        self,
        device: torch.device | str,
        gigabytes_per_second: float | None = None,
        recorder: Recorder | None = None,
        inject: Inject | None = None,
    ) -> None:
        """Without a rate transfers are as fast as the link."""
        super().__init__(device, recorder, inject)
        if gigabytes_per_second is not None and not gigabytes_per_second > 0:
            raise ConfigError(
                f"gigabytes_per_second={gigabytes_per_second} must be above 0; leave it out for "
                "the full speed of the link"
            )
        self._rate = gigabytes_per_second
        self._link = WorkStream("exchange", self.device, self.recorder, inject)
        # the next transfer leaves while one arrives
        self._buffers = _HostBuffer(self.device), _HostBuffer(self.device)
        if self._link.stream is not None:
            self._ready = new_event(self.device, blocking=False)
            self._host_link = HostLink(self._link.stream, self._rate is not None)

    def _mark(self) -> StreamEvent:
        """The same event each time: its streams wait for it before the next transfer."""
        if self.device.type != "cuda":
            return super()._mark()
        self._ready.record(current_stream(self.device))
        return StreamEvent(self._ready)

    def _transfer(self, transfer: Transfer) -> StreamEvent:
        rows, result, sent, received, ready, label = transfer
        assert sent == received, "one process sends all rows to itself"
        size = rows.nbytes
        buffer, other = self._buffers
        self._buffers = other, buffer
        nanoseconds = 0 if self._rate is None else round(size / self._rate)
        if self.device.type != "cuda":
            copy = partial(_copy_at_rate, result, buffer.of(size), rows, nanoseconds)
            return self._link.run(copy, (), label, size)
        work = partial(self._copy, result, buffer, rows, nanoseconds)
        return self._link.run(work, [ready], label, size)

    def _copy(self, target: Tensor, buffer: _HostBuffer, source: Tensor, nanoseconds: int) -> None:
        if source.nbytes == 0:
            return
        host = buffer.of(source.nbytes)
        assert buffer.free is not None
        self._host_link.copy(target, host, source, nanoseconds, self._ready, buffer.free)


def _copy_at_rate(target: Tensor, host: Tensor, source: Tensor, nanoseconds: int) -> None:
    end = time.perf_counter_ns() + nanoseconds
    there = host[: source.nbytes].view(source.dtype).view_as(source)
    there.copy_(source)
    target.copy_(there)
    if (rest := end - time.perf_counter_ns()) > 0:
        time.sleep(rest / 1e9)
