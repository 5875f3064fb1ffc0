"""The interface of an exchange: token rows go to the ranks that compute them, beside the compute
stream, and numbers of the host to all ranks.

| class                | token rows travel                                        |
|----------------------|----------------------------------------------------------|
| `LocalExchange`      | nowhere: one process computes its own rows               |
| `CollectiveExchange` | by torch.distributed: NCCL on GPUs, gloo on a CPU        |
| `StagedExchange`     | through pinned host memory and gloo, in a thread         |
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from overspill.core.errors import OrderError
from overspill.parallel.ranks import Ranks
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import Inject, StreamEvent, record_event
from overspill.transfer.work_stream import Arrival


class Transfer(NamedTuple):
    """Token rows to be sent."""

    rows: Tensor
    """The rows, contiguous."""
    result: Tensor
    """The tensor for rows that arrive."""
    sent: list[int]
    received: list[int]
    ready: StreamEvent
    """The event after which both tensors may be used."""
    label: str


class Exchange(ABC):
    """All ranks make the same calls in the same order, also those without rows."""

    rank: int = 0
    size: int = 1
    ranks: Ranks | None = None
    """The ranks that take part; None for one process."""

    def __init__(
        self,
        device: torch.device | str,
        recorder: Recorder | None = None,
        inject: Inject | None = None,
    ) -> None:
        """`recorder` gets the spans of transfers and compute; `inject` is called before each
        transfer, by fault-injection tests."""
        self.device = torch.device(device)
        self.recorder = recorder or Recorder(device=self.device)
        self.inject = inject

    def send(
        self,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        label: str = "",
        into: Tensor | None = None,
    ) -> Arrival:
        """Send the first `sent[0]` rows to rank 0, the next to rank 1, and so on. The rows that
        arrive, `received` of each rank, are in the order of ranks; they are written to `into`, a
        contiguous tensor, if it is given."""
        rows = rows.contiguous()
        result = rows.new_empty(sum(received), *rows.shape[1:]) if into is None else into
        assert (result.dtype, result.shape[1:]) == (rows.dtype, rows.shape[1:])
        # after the work that computes `rows`, and all that has used the memory of `result`
        ready = self._mark()
        end = self._transfer(Transfer(rows, result, list(sent), list(received), ready, label))
        return Arrival(self.device, result, end, rows)

    def _mark(self) -> StreamEvent:
        """The point that the compute stream has come to."""
        return record_event(self.device)

    @abstractmethod
    def _transfer(self, transfer: Transfer) -> StreamEvent:
        """Carry out a transfer; return its end. Does not wait for the device."""

    def gather_numbers(self, numbers_N: Tensor) -> Tensor:
        """The numbers of each rank, as many on all, [ranks, N]; in host memory."""
        if self.ranks is None:
            return numbers_N.unsqueeze(0)
        return self.ranks.gather_numbers(numbers_N)

    def __deepcopy__(self, memo: object) -> "Exchange":
        return self  # layers share it

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise OrderError(
            f"a layer with a {type(self).__name__} cannot be pickled: it belongs to running "
            "processes; save layer.state_dict() (with torch.save) and load it into a new layer"
        )


class LocalExchange(Exchange):
    """No exchange: token rows stay where they are."""

    def send(
        self,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        label: str = "",
        into: Tensor | None = None,
    ) -> Arrival:
        return Arrival(self.device, rows if into is None else into.copy_(rows))

    def _transfer(self, transfer: Transfer) -> StreamEvent:
        raise AssertionError("rows are not sent")
