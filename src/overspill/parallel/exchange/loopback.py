"""An exchange of one process with itself, to measure pipelines on one GPU.

Token rows are copied to pinned host memory and back by the copy engines. With a rate, a transfer
takes at least the time that its bytes need at this rate: a kernel of one thread waits for the rest
of it.
"""

import time
from functools import partial

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.parallel.exchange.interface import Exchange, Transfer
from overspill.trace.recorder import Recorder
from overspill.transfer.driver import copy_on, new_event
from overspill.transfer.streams import COMPLETED, Inject, StreamEvent
from overspill.transfer.work_stream import WorkStream

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
        with torch.inference_mode(False):
            self._clock = self._new_clock()
        if self.device.type == "cuda":
            self._outwards = torch.cuda.Stream(self.device)
            self._begun = new_event(self.device, blocking=False)

    def _new_clock(self) -> Tensor | None:
        if self._rate is None or self.device.type != "cuda":
            return None
        from overspill.parallel.exchange import link_triton

        return link_triton.new_clock(self.device)

    def _transfer(self, transfer: Transfer) -> StreamEvent:
        rows, result, sent, received, ready, label = transfer
        assert sent == received, "one process sends all rows to itself"
        source, target, size = rows.view(-1), result.view(-1), rows.nbytes
        host = self._host_memory(size).view(rows.dtype)
        nanoseconds = 0 if self._rate is None else round(size / self._rate)
        if self.device.type != "cuda":
            copy = partial(_copy_at_rate, target, host, source, nanoseconds)
            self._last = self._inwards.run(copy, (), label, size)
            return self._last
        work = partial(self._copy, target, host, source, nanoseconds)
        # after the transfer before, which shares the link and `host`
        self._last = self._inwards.run(work, [ready, self._last], label, size)
        return self._last

    def _copy(self, target: Tensor, host: Tensor, source: Tensor, nanoseconds: int) -> None:
        """Driver calls: torch's would take longer than the pieces."""
        stream, out = self._inwards.stream, self._outwards
        assert stream is not None
        if len(source) == 0:
            return
        self._begin()
        slow = self._rate is not None and self._rate <= _ONE_BY_ONE
        if slow or source.nbytes < _SMALL:
            copy_on(stream, host, source)
            copy_on(stream, target, host)
        else:
            self._begun.record(stream)
            self._begun.wait(out)
            pieces = (tensor.split(-(-len(tensor) // _PIECES)) for tensor in (source, host, target))
            for leaving, there, arriving in zip(*pieces, strict=True):
                copy_on(out, there, leaving)
                left = new_event(self.device, blocking=False)
                left.record(out)
                left.wait(stream)
                copy_on(stream, arriving, there)
        self._hold(nanoseconds)

    def _host_memory(self, size: int) -> Tensor:
        if len(self._host) < size:
            self._last.wait()  # it uses the memory that is replaced
            pinned = self.device.type == "cuda"
            with torch.inference_mode(False):  # later passes may train
                self._host = torch.empty(size + size // 4, dtype=torch.uint8, pin_memory=pinned)
        return self._host[:size]

    def _begin(self) -> None:
        if self._clock is not None:
            from overspill.parallel.exchange import link_triton

            link_triton.begin(self._clock)

    def _hold(self, nanoseconds: int) -> None:
        if self._clock is not None:
            from overspill.parallel.exchange import link_triton

            link_triton.hold(self._clock, nanoseconds)


def _copy_at_rate(target: Tensor, host: Tensor, source: Tensor, nanoseconds: int) -> None:
    end = time.perf_counter_ns() + nanoseconds
    host.copy_(source)
    target.copy_(host)
    if (rest := end - time.perf_counter_ns()) > 0:
        time.sleep(rest / 1e9)
