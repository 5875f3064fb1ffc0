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
class _Passage:
    """A micro-batch that has passed a stage, until its backward has."""

    end: GradientEdge | None = None
    """Where its backward begins; None: nothing below needs gradients."""
    hidden: Tensor | Parked | None = None
    """For the next stage."""
    grad: Tensor | Parked | None = None
    """Of `hidden`, from the next stage."""


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
    _passages: dict[tuple[int, int], _Passage] = field(default_factory=dict)

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
        before = self._passages.get((stage.number - 1, number))
        incoming = None if before is None else self._enter(before)
        batch, activations = self.micro_batches[number], self.activations
        saving = nullcontext() if activations is None else activations.saving((stage, number))
        with saving:
            result = self.blocks.run(stage.blocks, incoming, lambda: self.model(**batch))
        del incoming
        if stage.is_last:
            self._turn(stage, number, result)
        else:
            end = get_gradient_edge(result) if result.requires_grad else None
            passage = _Passage(end, self._park(result.detach(), "hidden states"))
            self._passages[stage.number, number] = passage
        del result
        if activations is not None:
            activations.advance()

    def _enter(self, before: _Passage) -> Tensor:
        assert before.hidden is not None
        hidden = self._unpark(before.hidden)
        before.hidden = None

        def receive(grad: Tensor) -> None:
            before.grad = self._park(grad, "gradient of hidden states")

        return hidden if before.end is None else entering(hidden, receive)

    # -- backward ---------------------------------------------------------------------------

    def _turn(self, stage: Stage, number: int, result: Any) -> None:
        """The last stage: its backward follows."""
        loss = self.loss(number, result)
        del result
        with self._accumulating(number):
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        if self.activations is not None:
            self.activations.forget((stage, number))

    def _backward(self, stage: Stage, number: int) -> None:
        activations = self.activations
        if activations is not None:
            activations.restore((stage, number))
            activations.restore((stage, number + 1))  # beside this one
        passage = self._passages.pop((stage.number, number))
        if passage.end is not None and passage.grad is not None:
            grad, passage.grad = self._unpark(passage.grad), None
            with self._accumulating(number):
                torch.autograd.backward([passage.end], [grad])
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
