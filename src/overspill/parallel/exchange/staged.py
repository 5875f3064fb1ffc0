"""An exchange through pinned host memory and gloo, for GPUs without peer-to-peer or NCCL.

A thread carries out the transfers in order: it waits until the rows are in host memory, exchanges
them, and queues their copy to the device. The group is its own, because other calls of the process
must not come between its transfers in another order than on other ranks.
"""

import queue
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from overspill.core.errors import RankError
from overspill.parallel.exchange.interface import Exchange, Transfer
from overspill.parallel.ranks import Ranks
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import Inject, StreamEvent
from overspill.transfer.work_stream import WorkStream


class _Issued:
    """The end of a transfer that a thread will issue, with the interface of a CUDA event."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._done = threading.Event()
        self._end: StreamEvent | None = None
        self._failure: BaseException | None = None

    def issued(self, end: StreamEvent | None, failure: BaseException | None = None) -> None:
        self._end, self._failure = end, failure
        self._done.set()

    def _wait_issued(self) -> StreamEvent:
        with self._ranks.calling():  # watchdogs see that this rank waits for others
            while not self._done.wait(1.0):
                pass  # a wait without a limit would not let Ctrl-C through
        if self._failure is not None:
            raise RankError(f"an exchange of token rows failed: {self._failure}") from self._failure
        assert self._end is not None
        return self._end

    def query(self) -> bool:
        return self._done.is_set() and self._wait_issued().done()

    def synchronize(self) -> None:
        self._wait_issued().wait()

    def wait(self, stream: torch.cuda.Stream) -> None:
        end = self._wait_issued()
        if end.event is not None:
            end.event.wait(stream)

    def record(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("it is recorded by the thread of the exchange")


_Jobs = queue.SimpleQueue[tuple[Callable[[], StreamEvent], _Issued] | None]


class StagedExchange(Exchange):
    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        recorder: Recorder | None = None,
        inject: Inject | None = None,
    ) -> None:
        super().__init__(device, recorder, inject)
        self.rank, self.size = ranks.rank, ranks.size
        self.ranks = ranks
        self._group = ranks.new_group()
        self._outwards = WorkStream("exchange out", device, self.recorder, inject)
        self._inwards = WorkStream("exchange in", device, self.recorder, inject)
        self._jobs: _Jobs = queue.SimpleQueue()
        threading.Thread(
            target=_carry_out, args=(self._jobs,), name="staged exchange", daemon=True
        ).start()
        weakref.finalize(self, self._jobs.put, None)

    def _transfer(self, transfer: Transfer) -> StreamEvent:
        rows, result, sent, received, ready, label = transfer
        assert self.ranks is not None
        outgoing, incoming = self._host(rows), self._host(result)
        out, into, group = self._outwards, self._inwards, self._group

        def job() -> StreamEvent:
            def leave() -> None:
                with out.entered():
                    outgoing.copy_(rows, non_blocking=True)

            def arrive() -> None:
                with into.entered():
                    result.copy_(incoming, non_blocking=True)

            out.run(leave, [ready], label, rows.nbytes).wait()
            with self.recorder.span("exchange", label, rows.nbytes):
                dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
            return into.run(arrive, (), label, result.nbytes)

        end = _Issued(self.ranks)
        self._jobs.put((job, end))
        return StreamEvent(end)

    def _host(self, tensor: Tensor) -> Tensor:
        pinned = tensor.is_cuda
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


@torch.inference_mode()  # results may be tensors of a caller in inference mode
def _carry_out(jobs: _Jobs) -> None:
    """End with None, or with the first failure: other ranks wait for a transfer that this one has
    not made, so none after it can succeed."""
    failure: BaseException | None = None
    while (found := jobs.get()) is not None:
        job, end = found
        try:
            if failure is not None:
                raise failure
            end.issued(job())
        except Exception as error:
            failure = error
            end.issued(None, error)
        del found, job, end  # holds tensors while it waits for the next one
