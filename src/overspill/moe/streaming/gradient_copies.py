"""Gradients of streamed experts on their way to host memory, and the threads that use them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.optim.updates import Update, Updates
from overspill.tiers.entry import Entry, Part
from overspill.tiers.slab import HostSlab, Progress
from overspill.tiers.store import ExpertStore
from overspill.transfer.downloads import Downloads, GradientRing
from overspill.transfer.outboxes import GradientPart
from overspill.transfer.streams import CopyStream, StreamEvent


class Gradient(NamedTuple):
    """Gradient of an expert on the device."""

    entry: Entry
    parts: Sequence[Tensor]
    square: Tensor  # the sum of its squares
    made: StreamEvent  # when it is complete


class GradientCopies:
    """Copies of gradients into a ring buffer, into the expert's host slot or into an outbox, each
    with its sum of squares, and the threads that use them. A part of `StreamingGradients`, which
    decides where each one goes."""

    def __init__(
        self,
        store: ExpertStore,
        stream: CopyStream,
        limit: int,
        threads: int,
        progress: Progress | None,
    ) -> None:
        """At most `limit` bytes of gradients wait on the device for their copy."""
        self._store = store
        self._progress = progress
        self.downloads = Downloads(stream, limit)
        pinned = store.memory.pinned
        self.squares = torch.zeros(len(store.places.entries), pin_memory=pinned)
        """Of each expert's gradient, by its number."""
        self._added_squares = torch.zeros(
            len(store.places.entries), pin_memory=pinned
        )  # to a kept one
        args = self.squares, self._added_squares, threads, stream.recorder, stream.inject
        self.updates = Updates(store, *args)
        self._awaited: Entry | None = None  # its gradient waits for a host slot

    def start_updates(self, buffers: int) -> None:
        """Allocate a ring of `buffers` and start the update threads, once."""
        if not self.updates.is_started:
            store, size = self._store, self._store.memory.layout.weight_bytes
            slab = HostSlab("gradient buffers", buffers, size, store.memory.pinned, self._progress)
            self.updates.start(GradientRing(store.sync, slab))

    def waiting(self) -> list[tuple[Entry, Part]]:
        """Return the expert whose gradient waits for a host slot, then experts whose update waits
        for parts on disk; under the lock."""
        awaited = [] if self._awaited is None else [(self._awaited, Part.WEIGHTS)]
        return [*awaited, *self.updates.waiting()]

    # -- copies -----------------------------------------------------------------------------

    def to_ring(self, gradient: Gradient, is_added: bool) -> tuple[int, StreamEvent]:
        """Copy a gradient into a ring buffer, which is returned with the end of the copy.
        `is_added`: it will be added to the gradient in the expert's host slot."""
        ring = self.updates.ring
        buffer = ring.take()
        try:
            squares = self._added_squares if is_added else self.squares
            flat = self._store.memory.layout.weights(ring.buffers[buffer])
            return buffer, self._copy(gradient, flat, squares[gradient.entry.number])
        except BaseException:
            ring.give(buffer)
            raise

    def to_host_slot(self, gradient: Gradient) -> StreamEvent:
        """Copy a gradient into the memory for the expert's kept gradient; return when it ends."""
        store, entry = self._store, gradient.entry
        square = self.squares[entry.number]
        if entry.disk_slot is None:  # its host slot is its own
            return self._copy(
                gradient, store.memory.layout.weights(store.host(entry, Part.GRADS)), square
            )
        with store.sync.lock:
            # first: the GPU may hold more experts than the host, and experts of this wave that were
            # delivered before must make room
            self._awaited = entry
            try:
                store.disk.request_transfers()
                store.sync.wait(lambda: entry.host_slot is not None, "a host slot (disk transfers)")
            finally:
                self._awaited = None
            store.hold(entry)
            flat = store.memory.layout.weights(store.host(entry, Part.GRADS))
            store.keep_gradient(entry)
        try:
            arrived = self._copy(gradient, flat, square)
            self.updates.submit(Update(entry, arrived))  # holds the slot until it has arrived
            return arrived
        finally:
            store.release(entry)

    def to_outbox(self, gradient: Gradient, slot: GradientPart) -> StreamEvent:
        """Copy a gradient into a slot of the outbox of this rank; return when it ends."""
        return self._copy(gradient, slot.gradient, slot.square)

    def _copy(self, gradient: Gradient, flat: Tensor, square: Tensor) -> StreamEvent:
        entry = gradient.entry
        starts = self._store.memory.layout.shape.starts
        pairs = [
            (flat[start : start + part.numel()], part.reshape(-1))
            for start, part in zip(starts, gradient.parts, strict=True)
        ]
        pairs.append((square, gradient.square))
        label = f"expert {entry.id.layer}.{entry.id.index}"
        return self.downloads.send(pairs, label, gradient.made)

    def check_finite(self) -> None:
        """Raise NonFiniteError, once, for gradients that are not finite; updates refuse them."""
        if torch.isfinite(self.squares).all():
            return
        self.updates.wait_idle()  # it reads the same numbers
        bad = (~torch.isfinite(self.squares)).nonzero().flatten().tolist()
        self.squares[bad] = 0.0
        first = self._store.places.entries[bad[0]].id
        raise NonFiniteError(
            f"the gradient of {len(bad)} experts (first: layer {first.layer}, expert "
            f"{first.index}) is NaN or infinite; they were not updated. Lower the learning "
            "rate or set max_grad_norm, and go on from the last checkpoint"
        )

    def wait(self) -> None:
        """Wait until all gradients have arrived and all updates are done."""
        self.downloads.wait()
        self.updates.wait_idle()

    def close(self) -> None:
        self.updates.close()
        self.updates.ring.buffers.close()
