"""The passes of micro-batches through the stages: all of them pass a stage before the next one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from overspill.models.stages.activations import Activations, Parked
from overspill.models.stages.blocks import Passing, StagedBlocks, entering
from overspill.moe.engine import Engine
from overspill.moe.pregate import Ahead
from overspill.parallel.stage_link import StageLink
from overspill.plan.order import StageVisit

MicroBatch = Mapping[str, Any]
Take = Callable[[int, Any], Tensor | None]
"""Function from the number of a micro-batch and the model's result for it to its loss."""


class Accumulates(Protocol):
    """Methods of the optimizer that a step uses."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Context in which backward passes do not complete the gradients."""


@dataclass(frozen=True)
class Stage:
    """Stage of this process."""

    number: int
    blocks: range
    layers: range
    """MoE layers of the stage, as the engine numbers them."""
    is_last: bool


@dataclass(eq=False)
class _Passed:
    """Tensor that has passed from one stage to the next and whose gradient has not come back."""

    like: Tensor
    """Tensor of the same size without memory."""
    end: GradientEdge | None
    """Edge of the graph at which the backward of the stage before begins; None: it runs on another
    rank, or there is none."""
    value: Tensor | Parked | None
    """Value for the next stage."""
    needs_grad: bool
    grad: Tensor | Parked | None = None
    """Gradient from the next stage."""


@dataclass(eq=False)
class StagedPass:
    """Inputs and outputs of the stages of this process in one pass of micro-batches."""

    model: Callable[..., Any]
    blocks: StagedBlocks
    stages: Sequence[Stage]
    engine: Engine
    link: StageLink | None
    """Connection to the ranks of other stages; None: all stages are in this process."""
    activations: Activations
    micro_batches: Sequence[MicroBatch]
    take: Take
    optimizer: Accumulates | None = None
    _passed: dict[tuple[int, int], list[_Passed]] = field(default_factory=dict)
    """Passed tensors by the stage and the micro-batch that they come from."""
    _ahead: dict[tuple[int, int], Ahead] = field(default_factory=dict)
    """Form of the results of pre-gates among the passed tensors."""

    def run(self, backward: bool) -> None:
        """Run the forward of all micro-batches, then their backward."""
        what = "a backward in stages" if backward else "a forward in stages"
        try:
            with nullcontext() if self.link is None else self.link.together(what):
                self._run(backward)
        finally:
            try:
                self.activations.clear()
            finally:
                self.engine.stage_order.follow(None)

    def _run(self, backward: bool) -> None:
        numbers = range(len(self.micro_batches))
        for stage in self.stages:
            for number in numbers:
                self._visit(stage, number, turns=stage.is_last and backward)
                self._forward(stage, number, backward)
        for stage in reversed(self.stages) if backward else ():
            for number in () if stage.is_last else numbers:
                self._visit(stage, number)
                self._backward(stage, number)

    def _visit(self, stage: Stage, number: int, turns: bool = False) -> None:
        layers, count = stage.layers, len(self.micro_batches)
        visit = StageVisit(layers.start, layers.stop, number, count, turns)
        self.engine.stage_order.follow(visit)

    # -- forward ----------------------------------------------------------------------------

    def _forward(self, stage: Stage, number: int, backward: bool) -> None:
        before = self._arrive(stage, number)
        incoming = None
        if stage.number:
            ahead = self._ahead.pop((stage.number - 1, number), [])
            incoming = Passing([self._enter(passed) for passed in before], ahead)
        batch = self.micro_batches[number]
        keeps = backward and not stage.is_last  # the last stage turns at once
        with self.activations.saving((stage, number)) if keeps else nullcontext():
            result = self.blocks.run(stage.blocks, incoming, lambda: self.model(**batch))
        del incoming
        if stage.is_last:
            self._end(stage, number, result, backward)
        else:
            self._leave(stage, number, result)
        del result
        self.activations.advance()

    def _arrive(self, stage: Stage, number: int) -> list[_Passed]:
        key = stage.number - 1, number
        if self.link is not None and stage.number:
            # whether the stage before needs gradients is not known here
            received = Passing.received(self.link.receive(self.link.previous))
            self._ahead[key] = received.ahead
            self._passed[key] = [
                _Passed(_like(t), None, t, torch.is_grad_enabled() and t.is_floating_point())
                for t in received.tensors
            ]
        return self._passed.get(key, [])

    def _enter(self, passed: _Passed) -> Tensor:
        assert passed.value is not None
        value, passed.value = self.activations.take(passed.value), None

        def receive(grad: Tensor) -> None:
            passed.grad = self.activations.park(grad, "pass back")

        return entering(value, receive) if passed.needs_grad else value

    def _leave(self, stage: Stage, number: int, result: Passing) -> None:
        passed = []
        for tensor in result.tensors:
            end = get_gradient_edge(tensor) if tensor.requires_grad else None
            value = None if self.link else self.activations.park(tensor.detach(), "pass on")
            passed.append(_Passed(_like(tensor), end, value, tensor.requires_grad))
        self._passed[stage.number, number] = passed
        self._ahead[stage.number, number] = result.ahead
        if self.link is not None:
            self.link.send(self.link.next, result.message())

    # -- backward ---------------------------------------------------------------------------

    def _end(self, stage: Stage, number: int, result: Any, backward: bool) -> None:
        """Run the last stage, where the backward of a micro-batch follows its forward."""
        loss = self.take(number, result)
        del result
        if not backward:
            return
        if loss is not None and loss.requires_grad:
            with self._accumulating(number):
                loss.backward()
        self._send_back(stage, number)

    def _backward(self, stage: Stage, number: int) -> None:
        self.activations.restore((stage, number))
        self.activations.restore((stage, number + 1))  # beside this one
        passed = self._passed.pop((stage.number, number))
        if self.link is not None:
            sent = [each for each in passed if each.like.is_floating_point()]
            for each, grad in zip(sent, self.link.receive(self.link.next), strict=True):
                each.grad = grad
        ends, grads = [], []
        for each in passed:
            if each.end is not None and each.grad is not None:
                ends.append(each.end)
                grads.append(self.activations.take(each.grad))
        del passed
        if ends:
            with self._accumulating(number):
                torch.autograd.backward(ends, grads)
        del ends, grads
        self._send_back(stage, number)
        self.activations.advance()

    def _send_back(self, stage: Stage, number: int) -> None:
        """Release the activations of a stage after the backward of a micro-batch, and send
        gradients to the rank of the stage before."""
        self.activations.forget((stage, number))
        if self.link is None or not stage.number:
            return
        grads = []
        for passed in self._passed.pop((stage.number - 1, number)):
            if passed.grad is not None:
                grads.append(self.activations.take(passed.grad))
            elif passed.like.is_floating_point():
                grads.append(torch.zeros_like(passed.like, device=self.engine.device))
        self.link.send(self.link.previous, grads)

    def _accumulating(self, number: int) -> AbstractContextManager[None]:
        last = number == len(self.micro_batches) - 1
        return nullcontext() if last or self.optimizer is None else self.optimizer.accumulate()


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
