"""Weight gradients of experts that the CPU computes."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

from overspill.compute.cpu_kernel import GradientKind, WeightGradient, factor_row_bytes
from overspill.moe.streaming.cpu_split import RowLimits
from overspill.moe.streaming.gradient_copies import GradientCopies
from overspill.optim import factored
from overspill.optim.updates import FactorRows, Update
from overspill.tiers.entry import Entry, Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.store import ExpertStore
from overspill.transfer.streams import COMPLETED, StreamEvent

_MOST = 0.5
"""Of the bytes of a gradient that its factors may have. With more rows their products with each
other, for the norm, would take as long as the gradient."""


def max_factors(layout: RecordLayout) -> int:
    """Return the most token rows of an expert with which factors are left in place of the gradient.
    0 without the kernel that uses them."""
    is_possible = layout.format is None and factored.is_available()
    return int(_MOST * rows_of_record(layout)) if is_possible else 0


def rows_of_record(layout: RecordLayout) -> int:
    """Return how many rows of factors fit the memory of a gradient."""
    return (
        layout.shape.numel * layout.dtype.itemsize // factor_row_bytes(layout.shape, layout.dtype)
    )


class _Placed(NamedTuple):
    """Place of the gradient of an expert in the running backward: a ring buffer, or its host
    slot."""

    entry: Entry
    buffer: int | None
    factors: FactorRows | None


class FormedGradients:
    """Weight gradients of CPU experts, a part of `StreamingGradients`. With few token rows the CPU
    leaves the factors of a gradient, and the update forms it. Factors are in the expert's memory
    for kept gradients, where those of further micro-batches follow, or several experts share a ring
    buffer."""

    def __init__(
        self,
        store: ExpertStore,
        copies: GradientCopies,
        kept: Mapping[int, StreamEvent],
        end_cpu_job: Callable[[], None],
    ) -> None:
        """`kept` are the experts with a kept gradient, which this does not change."""
        self._store = store
        self._places = store.places
        self._copies = copies
        self._kept = kept
        self._end_cpu_job = end_cpu_job
        self._most, self._capacity = (
            max_factors(store.memory.layout),
            rows_of_record(store.memory.layout),
        )
        self._row_bytes = factor_row_bytes(store.memory.layout.shape, store.memory.layout.dtype)
        self._factored: dict[int, FactorRows] = {}  # kept factors, by the number of the expert
        self._placed: list[_Placed] = []
        self._buffer: int | None = None  # of the ring, with `_used` rows
        self._used = 0
        self.end = COMPLETED
        """When the last gradients of the CPU are complete."""

    def limits(self, updates: bool) -> RowLimits | None:
        """Return the most token rows of one expert and of a backward; None: any. Where gradients
        have no memory of their own there are only factors, in ring buffers, of which the device
        needs some. With `updates` they will complete the step's gradient."""
        if not updates or Part.GRADS in self._store.memory.slabs:
            return None
        return RowLimits(
            self._most, len(self._copies.updates.ring.buffers) // 2 * (self._capacity - self._most)
        )

    def place(
        self, entries: Mapping[int, Entry], rows: Mapping[int, int]
    ) -> dict[int, WeightGradient]:
        """Return where the CPU leaves the gradients of a backward, by position."""
        self._buffer = None
        return {position: self._place(entry, rows[position]) for position, entry in entries.items()}

    def _place(self, entry: Entry, rows: int) -> WeightGradient:
        layout, number = self._store.memory.layout, entry.number
        square = self._copies.squares[number : number + 1]
        if Part.GRADS not in self._store.memory.slabs:  # gradients have no memory of their own
            first = self._take_room(rows)
            assert self._buffer is not None
            self._placed.append(_Placed(entry, self._buffer, FactorRows(rows, first)))
            return self._left(self._copies.updates.ring.buffers[self._buffer], first, square)
        memory = self._store.host(entry, Part.GRADS)
        before = self._factored.get(number, FactorRows(0)).rows
        if (before or number not in self._kept) and before + rows <= self._most:
            self._placed.append(_Placed(entry, None, FactorRows(before + rows)))
            return self._left(memory, before, square)
        self.form([number])
        kind = GradientKind.FORMED
        if number in self._kept:
            kind = GradientKind.ADDED
            self._kept[number].wait()
            self._copies.updates.wait_for(entry)  # others may still be added to it
        self._placed.append(_Placed(entry, None, None))
        return WeightGradient(layout.weights(memory), square, kind)

    def _take_room(self, rows: int) -> int:
        """Return the first of some free rows in `_buffer`."""
        ring = self._copies.updates.ring
        if self._buffer is None or self._used + rows > self._capacity:
            self._buffer, self._used = ring.take(), 0
        else:
            ring.share(self._buffer)
        first, self._used = self._used, self._used + rows
        return first

    def _left(self, memory: torch.Tensor, first: int, square: torch.Tensor) -> WeightGradient:
        rest = self._store.memory.layout.weights(memory)[
            first * self._row_bytes // self._store.memory.layout.dtype.itemsize :
        ]
        return WeightGradient(rest, square, GradientKind.FACTORED)

    def take(self, end: StreamEvent) -> list[_Placed]:
        """Return the places of the backward whose job has the end `end`; kept factors are noted."""
        self.end = end
        placed, self._placed = self._placed, []
        for entry, buffer, factors in placed:
            if buffer is None and factors is not None:
                self._factored[entry.number] = factors
        return placed

    # -- kept factors ---------------------------------------------------------------------------

    def take_factors(self, number: int) -> FactorRows | None:
        """Return the kept factors of an expert, for an update that uses them up."""
        return self._factored.pop(number, None)

    def form(self, numbers: Collection[int]) -> None:
        """Let update threads form the gradients of these experts, where factors are kept."""
        for number in sorted(self._factored.keys() & set(numbers)):
            entry, arrived = self._places.entries[number], self._kept[number]
            factors = self.take_factors(number)
            self._copies.updates.submit(Update(entry, arrived, accumulate=True, factors=factors))

    def measure(self) -> None:
        """Let update threads compute the squares of all kept factors."""
        for number, factors in self._factored.items():
            if not factors.is_measured:
                entry, arrived = self._places.entries[number], self._kept[number]
                update = Update(entry, arrived, use_kept=True, factors=factors)
                self._copies.updates.submit(update)
                self._factored[number] = factors._replace(is_measured=True)

    # -- failures ---------------------------------------------------------------------------------

    def drop_placed(self) -> None:
        """Give back the memory of the running backward, after a failure within it."""
        self._end_cpu_job()  # it must not write later
        for placed in self._placed:
            if placed.buffer is not None:
                self._copies.updates.ring.give(placed.buffer)
        self._placed.clear()

    def discard(self, numbers: Collection[int]) -> None:
        for number in self._factored.keys() & set(numbers):
            del self._factored[number]
