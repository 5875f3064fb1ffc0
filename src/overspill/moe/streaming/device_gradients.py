"""Gradients of streamed experts that wait on the compute device for the next micro-batch."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from overspill.tiers.layout import RecordLayout


class DeviceGradients:
    """Rows of device memory with sums of gradients that are not complete. A sum is downloaded once
    per step, not a gradient per micro-batch, and the CPU adds nothing. Rows are added to and read
    on the compute stream alone, so that they need no events."""

    def __init__(self, layout: RecordLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._resize(0)

    def _resize(self, count: int) -> None:
        size = count, self._layout.shape.numel
        self._rows = torch.empty(size, dtype=self._layout.dtype, device=self._device)
        self._free = list(range(count))
        self._held: dict[int, int] = {}  # the row of an expert, by its number

    def resize(self, count: int) -> None:
        """Give room to `count` experts, between steps."""
        assert not self._held
        if count != len(self):
            self._resize(0)  # first: not both at once
            self._resize(count)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._held

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def add(self, number: int, gradient: Sequence[Tensor]) -> bool:
        """Add to the expert's sum. Return False if there is no room for it."""
        is_new = number not in self._held
        if is_new and not self._free:
            return False
        row = self._held[number] = self._free.pop() if is_new else self._held[number]
        put = Tensor.copy_ if is_new else Tensor.add_
        for into, part in zip(self._parts(row, gradient), gradient, strict=True):
            put(into, part)
        return True

    def add_to(self, number: int, gradient: Sequence[Tensor]) -> None:
        """Add the expert's sum to `gradient`, in place; its row is free then."""
        row = self._held.pop(number)
        for part, held in zip(gradient, self._parts(row, gradient), strict=True):
            part.add_(held)
        self._free.append(row)

    def take(self, number: int) -> list[Tensor]:
        """Return a copy of the expert's sum; its row is free then."""
        row = self._held.pop(number)
        record = self._rows[row].clone()
        self._free.append(row)
        shape = self._layout.shape
        return [
            record[start : start + math.prod(size)].view(size)
            for start, size in zip(shape.starts, shape.sizes, strict=True)
        ]

    def numbers(self, among: Collection[int]) -> list[int]:
        """Return the experts in `among` that have a sum here."""
        return sorted(number for number in self._held if number in among)

    def _parts(self, row: int, like: Sequence[Tensor]) -> list[Tensor]:
        starts = self._layout.shape.starts
        return [
            self._rows[row, start : start + part.numel()].view(part.shape)
            for start, part in zip(starts, like, strict=True)
        ]

    def discard(self, numbers: Collection[int]) -> None:
        for number in self.numbers(numbers):
            self._free.append(self._held.pop(number))

    def close(self) -> None:
        """Release the memory."""
        self._resize(0)

    def check_conserved(self) -> None:
        rows = sorted([*self._free, *self._held.values()])
        assert rows == list(range(len(self))), "rows of gradients on the device leaked"
