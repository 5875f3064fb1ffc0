"""An exchange of one process with itself, to measure pipelines on one GPU.

Token rows are copied to pinned host memory and back by the copy engines. With a rate, a transfer
takes at least the time that its bytes need at this rate: a kernel of one thread waits for the rest
of it.
"""

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.parallel.exchange.interface import Exchange, Transfer
from overspill.trace.recorder import Recorder
from overspill.transfer.driver import Duplex, copy_through, new_event
from overspill.transfer.streams import COMPLETED, Inject, StreamEvent
from overspill.transfer.work_stream import WorkStream

if TYPE_CHECKING:
    from overspill.parallel.exchange.link_triton import Clock

_PIECES = 4  # of a transfer: while one arrives, the next one leaves
_ONE_BY_ONE = 12.0  # GB/s: slower links do not need pieces, whose launches take time
_SMALL = 1 << 20  # bytes: nor do transfers that take no longer than these launches


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
        self._inwards = WorkStream("exchange", self.device, self.recorder, inject)
        self._last = COMPLETED  # the end of the last transfer: they share one link
        self._host = torch.empty(0, dtype=torch.uint8)
        self._clock: Clock | None = None
        if self._inwards.stream is not None:
            event = new_event(self.device, blocking=False)
            outwards = torch.cuda.Stream(self.device)
            self._duplex = Duplex(outwards, self._inwards.stream, event)
            if self._rate is not None:
                self._clock = _new_clock(self.device)

    def _transfer(self, transfer: Transfer) -> StreamEvent:
        rows, result, sent, received, ready, label = transfer
        assert sent == received, "one process sends all rows to itself"
        size = rows.nbytes
        host = self._host_memory(size)
        nanoseconds = 0 if self._rate is None else round(size / self._rate)
        if self.device.type != "cuda":
            copy = partial(_copy_at_rate, result, host, rows, nanoseconds)
            self._last = self._inwards.run(copy, (), label, size)
            return self._last
        work = partial(self._copy, result, host, rows, nanoseconds)
        # after the transfer before, which shares the link and `host`
        self._last = self._inwards.run(work, [ready, self._last], label, size)
        return self._last

    def _copy(self, target: Tensor, host: Tensor, source: Tensor, nanoseconds: int) -> None:
        if source.nbytes == 0:
            return
        stream, clock = self._duplex.inwards, self._clock
        if clock is not None:
            clock.begin(stream)
        slow = self._rate is not None and self._rate <= _ONE_BY_ONE
        copy_through(
            self._duplex, host, target, source, 1 if slow or source.nbytes < _SMALL else _PIECES
        )
        if clock is not None:
            clock.hold(stream, nanoseconds)

    def _host_memory(self, size: int) -> Tensor:
        if len(self._host) < size:
            self._last.wait()  # it uses the memory that is replaced
            pinned = self.device.type == "cuda"
            with torch.inference_mode(False):  # later passes may train
                self._host = torch.empty(size + size // 4, dtype=torch.uint8, pin_memory=pinned)
        return self._host


@torch.inference_mode(False)  # later passes may train
def _new_clock(device: torch.device) -> "Clock":
    from overspill.parallel.exchange.link_triton import Clock

    return Clock(device)


def _copy_at_rate(target: Tensor, host: Tensor, source: Tensor, nanoseconds: int) -> None:
    end = time.perf_counter_ns() + nanoseconds
    there = host[: source.nbytes].view(source.dtype).view_as(source)
    there.copy_(source)
    target.copy_(there)
    if (rest := end - time.perf_counter_ns()) > 0:
        time.sleep(rest / 1e9)
