"""One training step in stages: all micro-batches pass a stage before the next one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from overspill.models.stages.activations import Parked, ParkedActivations
from overspill.models.stages.blocks import StagedBlocks, entering
from overspill.moe.engine import Engine
from overspill.plan.order import StageVisit

MicroBatch = Mapping[str, Any]
Loss = Callable[[int, Any], Tensor]
"""The loss of a micro-batch, from its number and from what the model returns."""


class Accumulates(Protocol):
    """What a step needs of the optimizer."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes in the context do not complete the gradients."""


@dataclass(frozen=True)
class Stage:
    """A run of blocks, and the MoE layers in them."""

    number: int
    blocks: range
    layers: range
    is_last: bool


@dataclass(eq=False)
class _Passed:
    """A tensor that has passed from one stage to the next, until its gradient has come back."""

    end: GradientEdge | None
    """Where the backward of the stage begins; None: nothing below needs gradients."""
    value: Tensor | Parked | None
    """For the next stage."""
    grad: Tensor | Parked | None = None
    """From the next stage."""


@dataclass(eq=False)
class StagedStep:
    """The passes of one step."""

    model: Callable[..., Any]
    blocks: StagedBlocks
    stages: Sequence[Stage]
    engine: Engine
    activations: ParkedActivations | None
    """None: activations stay on the device."""
    micro_batches: Sequence[MicroBatch]
    optimizer: Accumulates | None
    loss: Loss
    _passed: dict[tuple[int, int], list[_Passed]] = field(default_factory=dict)
    """By stage and micro-batch."""

    def run(self) -> None:
        """Forward and backward of all micro-batches."""
        try:
            for stage in self.stages:
                for number in range(len(self.micro_batches)):
                    self._visit(stage, number)
                    self._forward(stage, number)
            for stage in reversed(self.stages[:-1]):
                for number in range(len(self.micro_batches)):
                    self._visit(stage, number)
                    self._backward(stage, number)
        finally:
            self.engine.follow_stage(None)
            if self.activations is not None:
                self.activations.clear()

    def _visit(self, stage: Stage, number: int) -> None:
        layers, count = stage.layers, len(self.micro_batches)
        self.engine.follow_stage(
            StageVisit(layers.start, layers.stop, number, count, turns=stage.is_last)
        )

    # -- forward ----------------------------------------------------------------------------

    def _forward(self, stage: Stage, number: int) -> None:
        before = self._passed.get((stage.number - 1, number))
        incoming = None if before is None else [self._enter(passed) for passed in before]
        batch, activations = self.micro_batches[number], self.activations
        saving: AbstractContextManager[None] = nullcontext()
        if activations is not None and not stage.is_last:  # whose backward follows at once
            saving = activations.saving((stage, number))
        with saving:
            result = self.blocks.run(stage.blocks, incoming, lambda: self.model(**batch))
        del incoming
        if stage.is_last:
            self._turn(number, result)
        else:
            self._passed[stage.number, number] = [self._leave(tensor) for tensor in result]
        del result
        if activations is not None:
            activations.advance()

    def _leave(self, tensor: Tensor) -> _Passed:
        end = get_gradient_edge(tensor) if tensor.requires_grad else None
        return _Passed(end, self._park(tensor.detach(), "pass on"))

    def _enter(self, passed: _Passed) -> Tensor:
        assert passed.value is not None
        value, passed.value = self._unpark(passed.value), None

        def receive(grad: Tensor) -> None:
            passed.grad = self._park(grad, "pass back")

        return value if passed.end is None else entering(value, receive)

    # -- backward ---------------------------------------------------------------------------

    def _turn(self, number: int, result: Any) -> None:
        """The last stage: its backward follows."""
        loss = self.loss(number, result)
        del result
        with self._accumulating(number):
            if loss.requires_grad:
                loss.backward()

    def _backward(self, stage: Stage, number: int) -> None:
        activations = self.activations
        if activations is not None:
            activations.restore((stage, number))
            activations.restore((stage, number + 1))  # beside this one
        ends, grads = [], []
        for passed in self._passed.pop((stage.number, number)):
            if passed.end is not None and passed.grad is not None:
                ends.append(passed.end)
                grads.append(self._unpark(passed.grad))
        if ends:
            with self._accumulating(number):
                torch.autograd.backward(ends, grads)
        del ends, grads
        if activations is not None:
            activations.forget((stage, number))
            activations.advance()

    def _accumulating(self, number: int) -> AbstractContextManager[None]:
        last = number == len(self.micro_batches) - 1
        return nullcontext() if last or self.optimizer is None else self.optimizer.accumulate()

    # -- what passes from stage to stage ------------------------------------------------------

    def _park(self, tensor: Tensor, label: str) -> Tensor | Parked:
        return tensor if self.activations is None else self.activations.park(tensor, label)

    def _unpark(self, kept: Tensor | Parked) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        assert self.activations is not None
        return self.activations.take(kept)
