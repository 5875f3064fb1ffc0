"""Gradients and updates of experts at home on the compute device: the update of a wave is one
launch."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.moe.homes.memory import DeviceHomes
from overspill.moe.layer_pass import Wave
from overspill.optim.gradient_norm import expert_squares
from overspill.optim.kernel import AdamHyper, adamw_


class HomeGradients:
    """One of the two parts of `ExpertGradients`; its methods are explained there. Experts are known
    by their numbers, `layer * n_local + position`."""

    def __init__(self, homes: DeviceHomes, n_local: int, threads: int) -> None:
        self._homes = homes
        self._n_local = n_local
        self._threads = threads
        self._squares = torch.zeros(len(homes.layers) * n_local, device=homes.device)
        self._kept: set[int] = set()  # experts that hold a kept gradient of this step
        self._updated: set[int] = set()  # experts that were updated during this step's backward

    def attach(self, state_dtype: torch.dtype, keep: bool) -> None:
        self._homes.allocate_states(state_dtype)
        if keep:
            for layer in range(len(self._homes.layers)):
                self._homes.grads(layer)

    def reset_states(self) -> None:
        for layer in self._homes.layers:
            for state in layer.states.values():
                state.zero_()

    def add(self, layer: int, wave: Wave, dw: Sequence[Tensor], hyper: AdamHyper | None) -> None:
        numbers = range(layer * self._n_local + wave.first, layer * self._n_local + wave.stop)
        grad = torch.cat([part.flatten(1) for part in dw], dim=1).to(self._homes.layout.dtype)
        if hyper is None or not self._kept.isdisjoint(numbers):
            self._keep(layer, wave.first, grad)
            return
        self._check_squares(grad, numbers)
        self._updated.update(numbers)  # first: an interrupt may come during the update
        self._update(layer, wave.first, wave.stop, grad, hyper)

    def _check_squares(self, grad: Tensor, numbers: range) -> None:
        norms = torch.linalg.vector_norm(grad, dim=1, dtype=torch.float32)
        squares = self._squares[numbers.start : numbers.stop]
        squares.copy_(norms.square())
        # The first gradient of a step shows a NaN loss before anything is updated with it. The
        # others are checked in step(), where the device is waited for anyway.
        if not self._updated and not math.isfinite(squares.sum().item()):
            raise self._not_finite()

    def _keep(self, layer: int, first: int, grad: Tensor) -> None:
        grads = self._homes.grads(layer)
        for position, one in enumerate(grad, start=first):
            number = layer * self._n_local + position
            if number in self._kept:
                grads[position] += one
            else:
                grads[position].copy_(one)
                self._kept.add(number)

    def complete_layer(self, layer: int, hyper: AdamHyper | None) -> None:
        if hyper is not None:
            if self._updated:
                self._note_squares(layer)
            else:
                self._check_kept()
            self._update_layer(layer, hyper)

    def _numbers(self, layer: int) -> range:
        """The experts of a layer at home on the device."""
        first = layer * self._n_local
        return range(first, first + self._homes.counts[layer])

    def _note_squares(self, layer: int) -> None:
        """step() checks kept gradients that are used once others were: no wait for the device."""
        for number in self._kept.intersection(self._numbers(layer)):
            self._squares[number] = expert_squares([self._kept_gradient(number)[None]])[0]

    def _kept_gradient(self, number: int) -> Tensor:
        layer, position = divmod(number, self._n_local)
        return self._homes.grads(layer)[position]

    def _update_layer(self, layer: int, hyper: AdamHyper) -> None:
        """Kept gradients, or decay, for every expert that was not updated during backward."""
        for position, number in enumerate(self._numbers(layer)):
            if number not in self._updated:
                self._updated.add(number)
                kept = self._kept_gradient(number) if number in self._kept else None
                self._update(layer, position, position + 1, kept, hyper)

    def _update(
        self, layer: int, first: int, stop: int, grad: Tensor | None, hyper: AdamHyper
    ) -> None:
        records = self._homes.layers[layer]
        # bf16 moments are rounded with noise that begins anew with each record
        alone = records.states["exp_avg"].dtype == torch.bfloat16
        count = stop - first
        size = 1 if alone else count
        for at in range(0, count, size):
            record = records.record(first + at, first + at + size)
            part = None if grad is None else grad.view(count, -1)[at : at + size].view(-1)
            adamw_(record, part, hyper, self._threads)

    @property
    def has_updated(self) -> bool:
        return bool(self._updated)

    def squares(self) -> dict[int, float]:
        """Sum of squares of each kept gradient; waits for the device."""
        # tensor by tensor, as streamed gradients: the norm has the same bits for all homes
        sizes = [math.prod(size) for size in self._homes.layout.shape.sizes]
        numbers: list[int] = []
        found: list[Tensor] = []
        for layer in range(len(self._homes.layers)):
            kept = sorted(self._kept.intersection(self._numbers(layer)))
            if kept:
                positions = torch.tensor(kept, device=self._homes.device) - layer * self._n_local
                grads = self._homes.grads(layer)[positions]
                found.append(expert_squares(grads.split(sizes, dim=1)))
                numbers += kept
        return dict(zip(numbers, torch.cat(found).tolist(), strict=True)) if found else {}

    def _check_kept(self) -> None:
        """Before the first update with kept gradients; once a step, because it waits for the
        device."""
        if not all(map(math.isfinite, self.squares().values())):
            raise self._not_finite()

    def end_step(self, kept: Mapping[int, AdamHyper]) -> None:
        if kept:
            self._check_kept()
        for layer, hyper in kept.items():
            self._update_layer(layer, hyper)
        finite = not self._updated or math.isfinite(self._squares.sum().item())
        self.discard()
        if not finite:
            raise self._not_finite()

    def _not_finite(self) -> NonFiniteError:
        return NonFiniteError(
            "an expert's gradient is NaN or infinite; lower the learning rate or set "
            "max_grad_norm, and go on from the last checkpoint"
        )

    def discard(self, layer: int | None = None) -> None:
        last = len(self._squares) if layer is None else (layer + 1) * self._n_local
        numbers = range(0 if layer is None else layer * self._n_local, last)
        # a NaN is reported once: the next step starts clean
        self._squares[numbers.start : numbers.stop].zero_()
        self._kept.difference_update(numbers)
        self._updated.difference_update(numbers)
