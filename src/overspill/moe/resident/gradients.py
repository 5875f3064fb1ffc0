"""Gradients and updates of experts on the compute device: the update of a wave is one launch."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.moe.gradient_sink import GradientSink
from overspill.moe.layer_pass import Wave
from overspill.moe.resident.memory import ResidentMemory
from overspill.optim.gradient_norm import expert_squares
from overspill.optim.kernel import AdamHyper, RecordState, adamw_


class ResidentGradients(GradientSink):
    """Experts are known by their numbers, `layer * n_local + position`."""

    def __init__(self, memory: ResidentMemory, n_local: int, threads: int) -> None:
        self._memory = memory
        self._n_local = n_local
        self._threads = threads
        self._squares = torch.zeros(len(memory.weights), device=memory.device)
        self._kept: set[int] = set()  # experts that hold a kept gradient of this step
        self._updated: set[int] = set()  # experts that were updated during this step's backward

    def attach(self, state_dtype: torch.dtype, keep: bool) -> None:
        self._memory.lifetime.check()
        self._memory.allocate_states(state_dtype)
        if keep:
            self._memory.allocate_grads()

    def reset_states(self) -> None:
        for state in self._memory.states.values():
            state.zero_()

    def add(self, layer: int, wave: Wave, dw: Sequence[Tensor], hyper: AdamHyper | None) -> None:
        base = layer * self._n_local
        first, stop = base + wave.first, base + wave.stop
        grad = torch.cat([part.flatten(1) for part in dw], dim=1).to(self._memory.layout.dtype)
        if hyper is None or any(number in self._kept for number in range(first, stop)):
            self._keep(grad, first, stop)
            return
        self._check_squares(grad, first, stop)
        self._updated.update(range(first, stop))  # first: an interrupt may come during the update
        self._update(first, stop, grad, hyper)

    def _check_squares(self, grad: Tensor, first: int, stop: int) -> None:
        norms = torch.linalg.vector_norm(grad, dim=1, dtype=torch.float32)
        self._squares[first:stop] = norms.square()
        # The first gradient of a step shows a NaN loss before anything is updated with it. The
        # others are checked in step(), where the device is waited for anyway.
        if not self._updated and not math.isfinite(self._squares[first:stop].sum().item()):
            self.discard()
            raise self._not_finite()

    def _keep(self, grad: Tensor, first: int, stop: int) -> None:
        grads = self._memory.allocate_grads()
        for number in range(first, stop):
            if number in self._kept:
                grads[number] += grad[number - first]
            else:
                grads[number].copy_(grad[number - first])
                self._kept.add(number)

    def complete_layer(
        self, layer: int, counts: Sequence[int] | None, hyper: AdamHyper | None
    ) -> None:
        if hyper is not None:
            if self._updated:
                self._note_squares(layer)
            else:
                self._check_kept()
            self._update_layer(layer, hyper)

    def _numbers(self, layer: int) -> range:
        return range(layer * self._n_local, (layer + 1) * self._n_local)

    def _note_squares(self, layer: int) -> None:
        """step() checks kept gradients that are used once others were: no wait for the device."""
        grads = self._memory.grads
        for number in self._kept.intersection(self._numbers(layer)):
            assert grads is not None
            self._squares[number] = expert_squares([grads[number : number + 1]])[0]

    def _update_layer(self, layer: int, hyper: AdamHyper) -> None:
        """Kept gradients, or decay, for every expert that was not updated during backward."""
        numbers = self._numbers(layer)
        grads = self._memory.grads
        for number in numbers:
            if number not in self._updated:
                self._updated.add(number)
                kept = grads[number] if grads is not None and number in self._kept else None
                self._update(number, number + 1, kept, hyper)

    def _update(self, first: int, stop: int, grad: Tensor | None, hyper: AdamHyper) -> None:
        states = self._memory.states
        low = states.get("low")
        record = RecordState(
            self._memory.weights[first:stop].view(-1),
            None if low is None else low[first:stop].view(-1),
            states["exp_avg"][first:stop].view(-1),
            states["exp_avg_sq"][first:stop].view(-1),
        )
        adamw_(record, None if grad is None else grad.view(-1), hyper, self._threads)

    @property
    def has_updated(self) -> bool:
        return bool(self._updated)

    def sum_of_squares(self) -> float:
        grads = self._memory.grads
        if grads is None or not self._kept:
            return 0.0
        numbers = torch.tensor(sorted(self._kept), device=self._memory.device)
        # tensor by tensor, as streamed gradients: the norm has the same bits in every mode
        sizes = [math.prod(size) for size in self._memory.layout.shape.sizes]
        squares = [
            expert_squares(grads[piece].split(sizes, dim=1))
            for piece in numbers.split(self._n_local)
        ]
        return float(torch.cat(squares).double().sum().item())

    def _check_kept(self) -> None:
        """Before the first update with kept gradients; once a step, because it waits for the
        device."""
        if not math.isfinite(self.sum_of_squares()):
            self.discard()
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
        numbers = range(len(self._squares)) if layer is None else self._numbers(layer)
        # a NaN is reported once: the next step starts clean
        self._squares[numbers.start : numbers.stop].zero_()
        self._kept.difference_update(numbers)
        self._updated.difference_update(numbers)
