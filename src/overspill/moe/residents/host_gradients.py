"""Kept gradients of resident experts that wait in host memory."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from overspill.tiers.layout import RecordLayout
from overspill.transfer.downloads import Downloads
from overspill.transfer.driver import copy_on
from overspill.transfer.streams import Inject, StreamEvent, wait_event


class HostGradients:
    """Rows of host memory with the gradients of resident experts that wait for the global norm.

    The rows are host slots that the experts have left. Gradients are copied there during backward,
    when the link and host memory have little else to do, and read for the update while the CPU
    updates others. The memory on the device is worth more for further residents. Unlike the sums of
    `DeviceGradients` they are complete: nothing is added here, and each has the event of its copy.
    """

    def __init__(
        self,
        layout: RecordLayout,
        device: torch.device,
        unused: Callable[[], list[Tensor]],
        downloads: Downloads,
        inject: Inject | None,
    ) -> None:
        """`unused` returns the memory of host slots that no expert has."""
        self.inject = inject
        self._layout = layout
        self._device = device
        self._unused = unused
        self._downloads = downloads
        self._free: list[Tensor] | None = None
        # the row of each expert that had one since residents were changed, and the events of copies
        # of gradients that are kept now
        self._rows: dict[int, Tensor] = {}
        self._arrived: dict[int, StreamEvent] = {}
        self.buffer = torch.empty(0, dtype=layout.dtype, device=device)
        """Memory on the device that readers copy gradients to."""

    def __contains__(self, number: int) -> bool:
        return number in self._arrived

    def keep(self, number: int, gradient: Sequence[Tensor], made: StreamEvent) -> None:
        """Keep the gradient of an expert, which is complete on the device at `made`."""
        starts = self._layout.shape.starts
        row = self._row(number)
        pairs = [
            (row[start : start + part.numel()], part.reshape(-1))
            for start, part in zip(starts, gradient, strict=True)
        ]
        self._arrived[number] = self._downloads.send(pairs, f"gradient {number}", made)

    def _row(self, number: int) -> Tensor:
        if number not in self._rows:
            if self._free is None:
                self._free = self._unused()
            self._rows[number] = self._layout.weights(self._free[len(self._rows)])
        return self._rows[number]

    def get(self, number: int) -> Tensor:
        """Return a copy on the device of a flat gradient."""
        into = torch.empty_like(self._rows[number], device=self._device)
        return self._copy(self._rows[number], self._arrived[number], into)

    def reader(self, number: int) -> Callable[[], Tensor]:
        """Return a function that copies a gradient into memory of the device, which the next reader
        overwrites. It may be called after `discard`."""
        args = self._rows[number], self._arrived[number], self.allocate_buffer()
        return partial(self._copy, *args)

    def allocate_buffer(self) -> Tensor:
        """Return `buffer`, allocated once: between steps, when memory is not short."""
        if not len(self.buffer):
            self.buffer = self.buffer.new_empty(self._layout.shape.numel)
        return self.buffer

    def _copy(self, row: Tensor, arrived: StreamEvent, into: Tensor) -> Tensor:
        wait_event(self._device, arrived)
        if self._device.type == "cuda":
            copy_on(torch.cuda.current_stream(self._device), into, row)
        else:
            into.copy_(row)
        return into

    def discard(self, numbers: Collection[int]) -> None:
        for number in self._arrived.keys() & numbers:
            del self._arrived[number]

    def reset(self) -> None:
        """Forget the rows, between steps: other host slots are unused now."""
        assert not self._arrived
        self._free = None
        self._rows.clear()

    def close(self) -> None:
        """Drop all references to memory: that of host slots is freed with its last view."""
        self._arrived.clear()
        self.reset()
        self.buffer = self.buffer.new_empty(0)
