"""Activations of partitions between forward and backward: kept on the device, or copied to host
memory and back on a stream beside compute."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from overspill.plan.reuse import Restore
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import Inject, record_event
from overspill.transfer.work_stream import Arrival, WorkStream


class HostCopies:
    """Copies between the device and pinned host memory, in order."""

    def __init__(
        self, device: torch.device, recorder: Recorder | None = None, inject: Inject | None = None
    ) -> None:
        self.device = device
        self._stream = WorkStream("host copies", device, recorder, inject)

    def to_host(self, tensor: Tensor, label: str) -> Arrival:
        # torch's allocator of pinned memory gives a block out again after the copies that use it
        host = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
        )
        return self._copy(host, tensor, label)

    def to_device(self, host: Tensor, label: str) -> Arrival:
        return self._copy(torch.empty_like(host, device=self.device), host, label)

    def _copy(self, target: Tensor, source: Tensor, label: str) -> Arrival:
        def copy() -> None:
            with self._stream.entered():
                target.copy_(source, non_blocking=True)

        # after the work that computes `source`, and all that has used the memory of `target`
        end = self._stream.run(copy, [record_event(self.device)], label, source.nbytes)
        return Arrival(self.device, target, end, source)


@dataclass(eq=False)
class Saved:
    """One activation (T_DI or T_M) of all partitions."""

    name: str
    restore: Restore
    copies: HostCopies | None
    tensors: list[Tensor | None] = field(default_factory=list)
    """The activation of each partition: on the device, in host memory, or None to be repeated."""
    _moving: dict[int, Arrival] = field(default_factory=dict)

    def save(self, tensor: Tensor) -> None:
        """Save the activation of the next partition, in forward, after the last work that reads
        it."""
        number = len(self.tensors)
        if self.restore is Restore.OFFLOAD:
            assert self.copies is not None
            self._moving[number] = self.copies.to_host(tensor, f"offload {self.name} {number}")
            self.tensors.append(self._moving[number].result)
        else:
            self.tensors.append(tensor if self.restore is Restore.KEEP else None)

    def settle(self, number: int) -> None:
        """Let the compute stream wait until the activation is in host memory: its memory is
        free."""
        arrival = self._moving.pop(number, None)
        if arrival is not None:
            arrival.wait()

    def prefetch(self, number: int) -> None:
        """Begin to copy the activation to the device, in backward."""
        if self.restore is Restore.OFFLOAD and number < len(self.tensors):
            host = self.tensors[number]
            assert self.copies is not None
            assert host is not None
            self._moving[number] = self.copies.to_device(host, f"prefetch {self.name} {number}")

    def take(self, number: int) -> Tensor | None:
        """Return the activation on the device, in backward, or None."""
        arrival = self._moving.pop(number, None)
        return self.tensors[number] if arrival is None else arrival.wait()

    def abandon(self) -> None:
        """Let the compute stream wait for all copies, after a failure; their memory is then
        freed."""
        for number in [*self._moving]:
            self.settle(number)
