"""Activations and gradients that wait, on the device or in host memory, until their micro-batch
returns."""

import itertools
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.core.errors import OrderError
from overspill.moe.pipeline.activations import HostCopies
from overspill.moe.pregate import NotedCopy, Notes, notes_of
from overspill.transfer.work_stream import Arrival

SMALL = 1 << 16
"""Default size in bytes below which activations stay on the device, because a copy costs more than
the memory is worth."""


@dataclass(eq=False)
class Parked:
    """Tensor in host memory, or in a copy there or back."""

    leaving: Arrival
    version: int
    returning: Arrival | None = None

    @property
    def host(self) -> Tensor:
        return self.leaving.result

    def settle(self) -> None:
        """Let the compute stream wait until the copy is complete; the memory on the device is then
        free."""
        source = self.leaving.source
        if source is not None and source._version != self.version:
            raise OrderError(
                "an activation that backward needs was changed in place after its forward had "
                "saved it; offload_activations=False lets autograd say where"
            )
        self.leaving.wait()


@dataclass(eq=False)
class _Saved:
    """Tensor that autograd has saved."""

    kept: Tensor | Parked
    notes: Notes
    """Notes of the tensor; a block may add to them after it was saved."""
    copy: NotedCopy | None = None
    """Tensor that autograd has received back, with its notes."""


class Activations:
    """Activations of micro-batches, all of which stay on the device."""

    def park(self, tensor: Tensor, label: str) -> Tensor | Parked:
        """Keep a tensor, which must not be changed any more, until it is taken."""
        return tensor

    def take(self, kept: Tensor | Parked) -> Tensor:
        """Return a kept tensor on the device."""
        assert isinstance(kept, Tensor)
        return kept

    def saving(self, key: Hashable) -> AbstractContextManager[None]:
        """Context of a block whose saved activations are kept until `forget(key)`."""
        return nullcontext()

    def advance(self) -> None:
        """Note that a micro-batch has passed a stage."""

    def restore(self, key: Hashable) -> None:
        """Prepare the backward of a block."""

    def forget(self, key: Hashable) -> None:
        """Drop the tensors saved in a block, whose backward is over."""

    def clear(self) -> None:
        """Drop all tensors at the end of a step, also of one that has failed."""


class ParkedActivations(Activations):
    """Parks in host memory the tensors that autograd saves, and the tensors that pass between
    stages. The device holds the tensors of two micro-batches of a stage: one that computes, and one
    whose copies run beside it."""

    def __init__(self, copies: HostCopies, small: int = SMALL) -> None:
        """Activations of fewer than `small` bytes stay on the device."""
        self._copies, self._small = copies, small
        self._saved: dict[Hashable, list[Parked]] = {}
        self._current: list[Parked] = []  # of the micro-batch that computes
        self._previous: list[Parked] = []

    def park(self, tensor: Tensor, label: str) -> Parked:
        """Copy a tensor, which must not be changed any more, to host memory."""
        parked = Parked(self._copies.to_host(tensor, label), tensor._version)
        self._current.append(parked)
        return parked

    def prefetch(self, parked: Parked) -> None:
        """Begin to copy a parked tensor back."""
        if parked.returning is None:
            parked.settle()
            parked.returning = self._copies.to_device(parked.host, "restore")

    def take(self, kept: Tensor | Parked) -> Tensor:
        """Return a parked tensor on the device, or a tensor that was not parked."""
        if isinstance(kept, Tensor):
            return kept
        self.prefetch(kept)
        assert kept.returning is not None
        return kept.returning.wait()

    def advance(self) -> None:
        """Note that a micro-batch has passed a stage. The tensors that the micro-batch before it
        has parked leave the device."""
        for parked in self._previous:
            parked.settle()
        self._previous, self._current = self._current, []

    # -- tensors that autograd saves ----------------------------------------------------------

    @contextmanager
    def saving(self, key: Hashable) -> Iterator[None]:
        """Context of a block in which all large saved activations are parked, until
        `forget(key)`."""
        saved = self._saved[key] = []
        known: dict[Hashable, Parked] = {}

        def pack(tensor: Tensor) -> Tensor | _Saved:
            if not _is_activation(tensor):
                return tensor
            if tensor.nbytes < self._small:
                return _Saved(tensor, notes_of(tensor))
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            memory = (*place, tensor._version)
            if memory not in known:  # several operations save the same one
                known[memory] = self.park(tensor, "save")
                saved.append(known[memory])
            return _Saved(known[memory], notes_of(tensor))

        def unpack(found: Tensor | _Saved) -> Tensor:
            if isinstance(found, Tensor):
                return found
            tensor = self.take(found.kept)
            if found.copy is None and found.notes:  # autograd makes another tensor of it
                found.copy = NotedCopy(tensor, found.notes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        known.clear()  # from here on the memory may be used for something else

    def restore(self, key: Hashable) -> None:
        """Begin to copy back the tensors saved in a block, the last first."""
        for parked in reversed(self._saved.get(key, ())):
            self.prefetch(parked)

    def forget(self, key: Hashable) -> None:
        """Drop the tensors saved in a block, whose backward is over."""
        self._saved.pop(key, None)

    def clear(self) -> None:
        """Wait for all copies and free their memory, at the end of a step, also of one that has
        failed."""
        saved = itertools.chain.from_iterable(self._saved.values())
        for parked in (*self._previous, *self._current, *saved):
            parked.leaving.wait()
            if parked.returning is not None:
                parked.returning.wait()
        self._saved.clear()
        self._previous, self._current = [], []


def _is_activation(tensor: Tensor) -> bool:
    """Return whether a saved tensor is an activation: not a weight, a view of one, or an index."""
    base = tensor if tensor._base is None else tensor._base
    return base.is_floating_point() and not (base.is_leaf and base.requires_grad)
