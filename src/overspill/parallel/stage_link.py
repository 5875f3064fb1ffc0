"""Tensors between the ranks of neighbouring pipeline stages."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overspill.core.errors import ConfigError, RankError
from overspill.parallel.ranks import Ranks
from overspill.transfer.streams import to_host

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.uint8, torch.bool,
)  # fmt: skip
_MOST_DIMENSIONS = 8
_HEADER = 2048
"""Numbers of a message's header: the number of tensors, then the data type and the size of each."""
_FAILED = -1
"""Sent in place of the number of tensors by a rank that has left its pass."""


class _OtherFailed(Exception):
    """Another rank has left the pass; its error is not known yet."""


class StageLink:
    """Sends tensors to the rank of the next stage or of the one before it, and receives theirs.
    A message is received in the order in which it was sent. Sending does not wait."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """`ranks` divide the stages; all of them make a link."""
        self._ranks = ranks
        self._device = device
        self.next, self.previous = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
        self._sent: deque[tuple[Any, Tensor]] = deque()  # memory that is still read
        self._failed: set[int] = set()  # neighbours that have left the pass
        self._in_message = False  # whether the next tensor to receive is not a header
        self._host_group = ranks.new_group()
        # With NCCL two ranks that send to each other at once would both wait in one group.
        nccl = device.type == "cuda" and not ranks.through_host
        self._groups = [ranks.new_group("nccl") for _ in range(4)] if nccl else None

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        if self._groups is None:
            return self._host_group
        onwards = target == (source + 1) % self._ranks.size
        return self._groups[2 * onwards + source % 2]

    def send(self, target: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors."""
        group = self._group(self._ranks.rank, target)
        values = [tensor.detach().contiguous() for tensor in tensors]
        if self._ranks.through_host:
            values = [to_host(value) for value in values]
        self._isend(_header(values), target, self._host_group)  # nothing fails from here on
        for value in values:
            self._isend(value, target, group)
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def _isend(self, tensor: Tensor, target: int, group: dist.ProcessGroup) -> None:
        work = dist.isend(tensor, self._ranks.global_rank(target), group=group)
        self._sent.append((work, tensor))

    def receive(self, source: int) -> list[Tensor]:
        """The tensors of the next message, on the device."""
        group = self._group(source, self._ranks.rank)
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._recv(header, source, self._host_group)
        if header[0] == _FAILED:
            self._failed.add(source)
            raise _OtherFailed
        host = self._ranks.through_host
        received = []
        self._in_message = True  # memory may be short
        for dtype, shape in _sizes(header.tolist()):
            where = torch.device("cpu") if host else self._device
            value = torch.empty(shape, dtype=dtype, device=where, pin_memory=host)
            self._recv(value, source, group)
            received.append(value.to(self._device, non_blocking=True))
        self._in_message = False
        return received

    def _recv(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        with self._ranks.calling():
            dist.recv(tensor, self._ranks.global_rank(source), group=group)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Make a pass fail on all ranks or on none: if one fails, the others raise RankError, also
        while they wait for its messages. The link can be used again."""
        told = False
        try:
            with self._ranks.together(what):
                try:
                    if self._in_message:
                        raise RankError("a message was received in part; start the ranks again")
                    yield
                except _OtherFailed:
                    told = self._tell()  # all ranks learn the cause at the end of the block
                except Exception:
                    told = self._tell()
                    raise
        except Exception:
            if not told:  # this rank had completed its part
                self._tell()
            self._drop()
            raise
        with self._ranks.calling():
            while self._sent:
                self._sent.popleft()[0].wait()

    def _tell(self) -> bool:
        """Wake neighbours that wait for this rank."""
        header = torch.full((_HEADER,), _FAILED)
        for neighbour in {self.next, self.previous}:
            with suppress(RuntimeError):  # it may be gone
                self._isend(header, neighbour, self._host_group)
        return True

    def _drop(self) -> None:
        """Receive all that neighbours have sent in this pass, until they say that it failed."""
        for neighbour in {self.next, self.previous} - self._failed:
            with suppress(_OtherFailed, RuntimeError):  # it may be gone
                while not self._in_message:
                    self.receive(neighbour)
        self._failed.clear()


def _header(tensors: Sequence[Tensor]) -> Tensor:
    numbers = [len(tensors)]
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.dim() > _MOST_DIMENSIONS:
            raise ConfigError(
                f"hidden states of {tensor.dtype} with {tensor.dim()} dimensions cannot pass to "
                "another rank; train this model without ranks along stages"
            )
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    if len(numbers) > _HEADER:
        raise ConfigError(f"{len(tensors)} tensors are too many to pass to another rank at once")
    header = torch.zeros(_HEADER, dtype=torch.int64)
    header[: len(numbers)] = torch.tensor(numbers)
    return header


def _sizes(numbers: list[int]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    count, *rest = numbers
    found, at = [], 0
    for _ in range(count):
        dtype, dims = rest[at], rest[at + 1]
        found.append((_DTYPES[dtype], tuple(rest[at + 2 : at + 2 + dims])))
        at += 2 + dims
    return found
