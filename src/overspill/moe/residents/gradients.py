"""Gradients and updates of resident experts: each tensor of a wave's gradient is one launch, and
backward never waits for the device."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.moe.gradient_sink import GradientSink
from overspill.moe.layer_pass import Wave
from overspill.moe.residents.host_gradients import HostGradients
from overspill.moe.residents.memory import LayerRecords, Residents
from overspill.optim.arguments import AdamHyper
from overspill.optim.gradient_norm import expert_squares, tensors_of
from overspill.optim.kernel import adamw_
from overspill.transfer.streams import record_event


class ResidentGradients(GradientSink):
    """Sink of the gradients of resident experts, which are updated on the compute device.

    A NaN loss makes the first gradients of a step NaN. They are checked before the first update, on
    the device: a number there (`not_finite` of `adamw_`) guards all updates of the step, and step()
    reads it. A gradient that is not finite later stops the updates after it.
    """

    def __init__(
        self,
        residents: Residents,
        n_local: int,
        threads: int,
        host: Callable[[], HostGradients | None],
    ) -> None:
        """`host` gives None while all kept gradients stay on the device."""
        self._residents = residents
        self._n_local = n_local
        self._threads = threads
        self._host = host
        self.on_device = [0] * len(residents)
        """Experts of each layer whose kept gradients stay on the device if `host` takes others."""
        self._host_squares: dict[int, Tensor] = {}  # of gradients in host memory, on the device
        self._not_finite = torch.zeros((), dtype=torch.int32, device=residents.device)
        self._kept: set[int] = set()  # experts that hold a kept gradient of this step
        self._squares: dict[int, float] | None = None  # of the kept gradients, once computed
        self._updated: set[int] = set()  # experts that were updated during this step's backward

    def _number(self, layer: int, position: int) -> int:
        return layer * self._n_local + position

    def allocate(self, keep: bool) -> None:
        if keep:
            for layer in range(len(self._residents)):
                self._grads(layer)

    def _on_device(self, layer: int) -> int:
        """Return how many experts of a layer, its first ones, keep gradients on the device."""
        count = self._residents.counts[layer]
        return count if self._host() is None else min(count, self.on_device[layer])

    def _grads(self, layer: int) -> Tensor:
        return self._residents.grads(layer, self._on_device(layer))

    def keep_on_device(self, counts: Sequence[int]) -> None:
        """Set `on_device`, between steps."""
        if list(counts) != self.on_device:
            self._residents.release_grads()
            self.on_device = list(counts)
            for layer in range(len(counts)):
                self._grads(layer)
        if (host := self._host()) is not None:
            host.allocate_buffer()

    def residents_changed(self) -> None:
        """Keep no gradient on the device until `keep_on_device` is called again."""
        if any(self.on_device):
            self._residents.release_grads()
            self.on_device = [0] * len(self._residents)

    def reset_states(self) -> None:
        for layer in range(len(self._residents)):
            for state in self._residents[layer].states.values():
                state.zero_()

    def add(
        self,
        layer: int,
        wave: Wave,
        dw: Sequence[Tensor],
        hyper: AdamHyper | None,
        more: bool = False,
    ) -> None:
        numbers = range(self._number(layer, wave.first), self._number(layer, wave.stop))
        dw = [part.flatten(1).to(self._residents.layout.dtype) for part in dw]
        if hyper is None or not self._kept.isdisjoint(numbers):
            self._keep(layer, wave.first, dw)
            self._kept.update(numbers)
            return
        if not self._updated:
            # before the first update of a step; does not wait for the device
            self._not_finite.logical_or_(~torch.isfinite(expert_squares(dw)).all())
        self._updated.update(numbers)  # first: an interrupt may come during the update
        if self._residents.device.type == "cpu":
            dw = [torch.cat(dw, dim=1)]  # whole records, for the bits of the update threads
        records = self._residents[layer]
        for start, part in zip(self._residents.layout.shape.starts, dw, strict=False):
            self._update(records, slice(wave.first, wave.stop), part, hyper, start)

    def _keep(self, layer: int, first: int, dw: Sequence[Tensor]) -> None:
        self._squares = None
        on_device = self._on_device(layer)
        grads = self._grads(layer)
        positions = range(first, min(first + len(dw[0]), on_device))
        for has_kept, experts in _runs(positions, lambda p: self._number(layer, p) in self._kept):
            of_wave = slice(experts.start - first, experts.stop - first)
            for start, part in zip(self._residents.layout.shape.starts, dw, strict=True):
                kept = grads[experts, start : start + part.shape[1]]
                if has_kept:
                    kept += part[of_wave]
                else:
                    kept.copy_(part[of_wave])
        in_host = range(max(first, on_device), first + len(dw[0]))
        if in_host:
            of_wave = slice(in_host.start - first, in_host.stop - first)
            self._keep_in_host(layer, in_host, [part[of_wave] for part in dw])

    def _used_host(self) -> HostGradients:
        host = self._host()
        assert host is not None, "all kept gradients are on the device"
        return host

    def _keep_in_host(self, layer: int, positions: range, dw: Sequence[Tensor]) -> None:
        host = self._used_host()
        numbers = range(self._number(layer, positions.start), self._number(layer, positions.stop))
        for offset, number in enumerate(numbers):
            if number in host:  # a layer that was used twice
                kept = host.get(number)
                for start, part in zip(self._residents.layout.shape.starts, dw, strict=True):
                    part[offset] += kept[start : start + part.shape[1]]
        squares = expert_squares(dw)
        made = record_event(self._residents.device)
        for offset, number in enumerate(numbers):
            host.keep(number, [part[offset] for part in dw], made)
            self._host_squares[number] = squares[offset]

    def kept(self) -> Collection[int]:
        return self._kept

    def change_kept(self, number: int, change: Callable[[Tensor], None]) -> None:
        layer, position = divmod(number, self._n_local)
        is_kept, self._squares = number in self._kept, None
        self._kept.add(number)
        if position < self._on_device(layer):
            grad = self._grads(layer)[position]
            change(grad if is_kept else grad.zero_())
            return
        host, layout = self._used_host(), self._residents.layout
        zeros = torch.zeros(layout.shape.numel, dtype=layout.dtype, device=self._residents.device)
        grad = host.get(number) if is_kept else zeros
        change(grad)
        host.discard((number,))
        parts = tensors_of(grad[None], layout.shape)
        self._keep_in_host(layer, range(position, position + 1), parts)

    def complete(self, layer: int, counts: Sequence[int] | None, hyper: AdamHyper | None) -> None:
        if hyper is not None:
            if not self._updated:
                for _, squares in self._kept_squares():
                    self._not_finite.logical_or_(~torch.isfinite(squares).all())
            self._update_layer(layer, hyper)

    def _update_layer(self, layer: int, hyper: AdamHyper) -> None:
        """Kept gradients, or decay, for every expert that was not updated during backward."""
        positions = [
            position
            for position in range(self._residents.counts[layer])
            if self._number(layer, position) not in self._updated
        ]
        self._updated.update(self._number(layer, position) for position in positions)
        in_host = [p for p in positions if self._number(layer, p) in self._host_squares]
        positions = [position for position in positions if position not in in_host]
        for has_kept, experts in _runs(positions, lambda p: self._number(layer, p) in self._kept):
            kept = self._grads(layer)[experts] if has_kept else None
            self._update(self._residents[layer], experts, kept, hyper)
        if not in_host:
            return
        host = self._used_host()

        def update(position: int, read: Callable[[], Tensor], records: LayerRecords) -> None:
            self._update(records, slice(position, position + 1), read()[None], hyper)

        readers = [host.reader(self._number(layer, position)) for position in in_host]
        updates = [partial(update, *pair) for pair in zip(in_host, readers, strict=True)]
        self._residents.update_beside(layer, updates, host.inject)

    def _update(
        self,
        records: LayerRecords,
        experts: slice,
        grad: Tensor | None,
        hyper: AdamHyper,
        start: int = 0,
    ) -> None:
        """`grad` is that of the elements of each record from `start` on; None is zero for all."""
        stop = self._residents.layout.shape.numel if grad is None else start + grad.shape[1]
        record = records.record(experts, slice(start, stop))
        guard = self._not_finite
        adamw_(record, grad, hyper, self._threads, start=start, not_finite=guard)

    @property
    def has_updated(self) -> bool:
        return bool(self._updated)

    def squares(self) -> dict[int, float]:
        if self._squares is None:
            found = list(self._kept_squares())
            numbers = itertools.chain.from_iterable(numbers for numbers, _ in found)
            values = torch.cat([squares for _, squares in found]).tolist() if found else []
            self._squares = dict(zip(numbers, values, strict=True))
        return self._squares

    def _kept_squares(self) -> Iterator[tuple[range, Tensor]]:
        """Numbers of experts and the sums of squares of their kept gradients, on the device."""
        # tensor by tensor, as streamed gradients: the norm has the same bits wherever experts are
        for layer, count in enumerate(self._residents.counts):
            first = self._number(layer, 0)
            in_host = self._host_squares
            kept = [p for p in range(count) if first + p in self._kept and first + p not in in_host]
            for _, experts in _runs(kept, lambda _: True):
                grads = self._grads(layer)[experts]
                numbers = range(first + experts.start, first + experts.stop)
                yield numbers, expert_squares(tensors_of(grads, self._residents.layout.shape))
        for number, square in self._host_squares.items():
            yield range(number, number + 1), square[None]

    def check(self, kept: Mapping[int, AdamHyper]) -> None:
        if kept and not all(map(math.isfinite, self.squares().values())):
            raise self._error()

    def step(self, kept: Mapping[int, AdamHyper]) -> None:
        # waits for the device, before more updates are queued
        finite = not self._updated or not self._not_finite.item()
        for layer, hyper in kept.items():
            self._update_layer(layer, hyper)
        self.discard()
        if not finite:
            raise self._error()

    def _error(self) -> NonFiniteError:
        return NonFiniteError(
            "an expert's gradient is NaN or infinite; lower the learning rate or set "
            "max_grad_norm, and go on from the last checkpoint"
        )

    def discard(self, layer: int | None = None) -> None:
        layers = range(len(self._residents)) if layer is None else range(layer, layer + 1)
        numbers = range(self._number(layers.start, 0), self._number(layers.stop, 0))
        self._kept.difference_update(numbers)
        if (host := self._host()) is not None:
            host.discard(numbers)
        for number in self._host_squares.keys() & numbers:
            del self._host_squares[number]
        self._squares = None
        self._updated.difference_update(numbers)
        if not self._updated:
            self._not_finite.zero_()  # a NaN is reported once: the next step starts clean


def _runs(positions: Iterable[int], key: Callable[[int], bool]) -> Iterator[tuple[bool, slice]]:
    """Neighbouring positions with the same key."""
    groups = itertools.groupby(enumerate(positions), lambda item: (item[1] - item[0], key(item[1])))
    for (_, value), group in groups:
        members = [position for _, position in group]
        yield value, slice(members[0], members[-1] + 1)
