"""The training step of the experts as a state machine.

Each layer is in one state:

    EMPTY ──begin_backward──▶ RUNNING ──end_backward──▶ PARTIAL    more of the gradient will come
      ▲                         ▲  │                      │
      │                         └──┼──begin_backward──────┘
      │                            ├──end_backward──▶ COMPLETE     kept until step()
      │                            └──end_backward──▶ UPDATED      updated during backward
      └── step(): PARTIAL, COMPLETE and UPDATED; discard(), drop(): PARTIAL, COMPLETE and RUNNING

In step() the state is STEPPING. A layer that stays RUNNING or STEPPING has failed there.

A gradient is complete when its backward runs outside of `accumulate()` and no other forward of the
layer waits for its backward. It is kept with clipping, or updates the experts at once.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from torch import Tensor

from overspill.compute.cpu_kernel import WeightGradient
from overspill.core.errors import NonFiniteError, OrderError
from overspill.moe.attached_optimizer import AttachedOptimizer
from overspill.moe.gradients import ExpertGradients
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.layer_states import AFTER_BACKWARD, LayerState, LayerStates
from overspill.moe.pending_passes import PendingPasses
from overspill.moe.records import ExpertRecords
from overspill.optim.arguments import AdamHyper
from overspill.optim.gradient_norm import gradient_norm
from overspill.optim.interfaces import UpdateRule
from overspill.parallel.ranks import Ranks
from overspill.transfer.streams import StreamEvent

ALMOST_ZERO = 1e-30
"""A norm that adds nothing to others in float32, and that shows whether it was scaled."""

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _exclusive(
    method: Callable[Concatenate["TrainingStep", _Args], _Result],
) -> Callable[Concatenate["TrainingStep", _Args], _Result]:
    """Make a method wait for passes of other threads."""

    @functools.wraps(method)
    def call(self: "TrainingStep", /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with self.lock:
            return method(self, *args, **kwargs)

    return call


class TrainingStep:
    """State of a training step: it follows the passes of all layers, refuses calls in the wrong
    order, and decides when gradients are kept and when they update experts."""

    def __init__(
        self,
        n_layers: int,
        gradients: ExpertGradients,
        records: ExpertRecords,
        n_ranks: int = 1,
        planned: bool = True,
    ) -> None:
        """Gradients are sums over the losses of `n_ranks`, of which the model's is the mean.
        `planned` says whether there is memory for them and for optimizer states."""
        self.gradients = gradients
        self._records = records
        self._n_ranks = n_ranks
        self.lock = threading.RLock()  # held during a pass and during a step
        self.optimizer = AttachedOptimizer(gradients, planned, self.lock)
        self.states = LayerStates(n_layers, gradients)
        self.passes = PendingPasses(n_layers)
        self._keeps = False  # whether this step's gradients are kept until step()
        self._completing = False  # whether the running backward completes its layer's gradient
        self._updated_with: dict[int, AdamHyper] = {}  # layers updated during backward
        self._overwritten = False  # whether weights were loaded over those updates
        self._without_rule: set[int] = set()  # layers of this step that the optimizer did not have
        self._used: set[int] = set()  # layers whose gradients step() has used: zero_grad() is due

    # -- the optimizer ----------------------------------------------------------------------

    @_exclusive
    def attach(self, rule: UpdateRule, trained: bool) -> bool:
        """Follow `rule` from now on. An optimizer that replaces a deleted one starts from zero;
        return whether it drops gradients of an unfinished step. Only `trained` experts need
        memory."""
        replaces = self.optimizer.attach(rule, trained)
        dropped = self.states.has_gradients
        if replaces:
            self._abort()
            self.passes.forget_expected()
            self.optimizer.reset_states()
        return dropped

    def check_joins(self, layers: Iterable[int]) -> None:
        """Raise if the optimizer gets one of `layers` after its backward in this step, which has
        computed no weight gradients."""
        for layer in self._without_rule.intersection(layers):
            raise OrderError(
                f"the experts of MoE layer {layer} were added to the optimizer between backward "
                "and step(), and their gradients were not computed; add them after step() or "
                "zero_grad()"
            )

    # -- passes -----------------------------------------------------------------------------

    def check_backward(self, layer_pass: LayerPass) -> None:
        """Raise if the weights are not those of the forward: a backward needs them, also one
        without weight gradients."""
        layer = layer_pass.layer
        if self.states[layer] in AFTER_BACKWARD or layer_pass not in self.passes:
            raise OrderError(
                f"MoE layer {layer} got a second backward before step(), or one of a graph from "
                "before step(); call opt.step() after each backward, or wrap all but the last in "
                "`with opt.accumulate():`"
            )
        self.states.check_finished(layer)

    def begin_backward(self, layer_pass: LayerPass) -> bool:
        """Begin a layer's backward, before its first wave; return whether weight gradients are
        needed."""
        layer = layer_pass.layer
        rule = self.optimizer.rule
        try:
            if rule is None:
                raise OrderError(
                    "backward through offloaded experts needs their optimizer: create "
                    "overspill.AdamW(model, lr=...) before the first backward"
                )
            self.check_backward(layer_pass)
            if layer in self._used:
                raise OrderError(
                    "backward after step() without zero_grad(): in plain PyTorch it would add to "
                    "the gradients of the last step, which experts do not have any more; call "
                    "opt.zero_grad() after each step()"
                )
        finally:
            self.passes.close(layer_pass)
        hyper = rule.hyper(layer)
        if hyper is None:
            self._without_rule.add(layer)
            return False
        self.optimizer.allocate_states()
        self._completing = not rule.accumulating and not self.passes.of_layer(layer)
        if not self._completing and not self.states.has_gradients:
            self.gradients.expect_more()
        self.states[layer] = LayerState.RUNNING
        self._keeps = rule.keep_gradients
        if self._completing and not self._keeps:
            self._updated_with[layer] = hyper
            self.optimizer.begin_update(layer)
        if layer_pass.sent is not None:
            self.gradients.begin_backward(layer_pass.sent.shared)
        return True

    def deliver(self, layer_pass: LayerPass, wave: Wave, dw: Sequence[Tensor]) -> None:
        """Take the gradients of a wave."""
        layer = layer_pass.layer
        assert self.states[layer] is LayerState.RUNNING
        with self._forgotten_if_not_finite():
            self.gradients.add(
                layer, wave, dw, self._updated_with.get(layer), more=not self._completing
            )

    def place(self, layer_pass: LayerPass) -> dict[int, WeightGradient]:
        """Return the memory where the CPU leaves the weight gradients of its experts of a pass, by
        position."""
        layer, counts = layer_pass.layer, layer_pass.rows.counts
        assert self.states[layer] is LayerState.RUNNING
        assert counts is not None
        rows = {position: counts[position] for position in sorted(layer_pass.on_cpu)}
        updates = layer in self._updated_with
        return self.gradients.streamed.place(layer, rows, updates, more=not self._completing)

    def deliver_formed(self, layer_pass: LayerPass, end: StreamEvent) -> None:
        """Take the gradients that the CPU has left, which are complete at `end`."""
        layer = layer_pass.layer
        assert self.states[layer] is LayerState.RUNNING
        self.gradients.streamed.add_formed(end, self._updated_with.get(layer))

    def end_backward(self, layer_pass: LayerPass) -> None:
        """End a layer's backward, after its last wave."""
        layer = layer_pass.layer
        if self.states[layer] is not LayerState.RUNNING:
            return
        hyper = self._updated_with.get(layer)
        if layer_pass.sent is not None:
            self.gradients.collect(layer, hyper)
        if not self._completing:
            self.states[layer] = LayerState.PARTIAL
            return
        with self._forgotten_if_not_finite():
            self.gradients.complete(layer, layer_pass.rows.counts, hyper)
        self.states[layer] = LayerState.COMPLETE if hyper is None else LayerState.UPDATED

    @contextmanager
    def _forgotten_if_not_finite(self) -> Iterator[None]:
        """After NonFiniteError the gradients are discarded: the step starts over."""
        try:
            yield
        except NonFiniteError:
            self._forget()
            raise

    # -- the end of a step --------------------------------------------------------------------

    @_exclusive
    def prepare_step(self) -> None:
        """Wait for readers of weights before ranks meet in a step. Owners may update experts then
        of which no backward of this step has ended here: a forward without gradients may still read
        them."""
        if LayerState.PARTIAL in self.states:
            self.gradients.wait_readers()

    @_exclusive
    def step(self) -> None:
        """End a step: kept gradients update the experts."""
        rule = self.optimizer.rule
        assert rule is not None
        self.states.check_all_finished()
        self._check_unchanged(rule)
        self._records.mark_changed()
        self.passes.forget()
        states = self.states.with_gradients()
        kept: dict[int, AdamHyper] = {}
        for layer in states:
            self.optimizer.begin_update(layer)
            self.states[layer] = LayerState.STEPPING
        with self._forgotten_if_not_finite():
            for layer, state in states.items():
                hyper = rule.hyper(layer)
                if state is LayerState.PARTIAL:
                    # a graph was freed, or every backward ran under accumulate()
                    self.gradients.complete(layer, None, None if self._keeps else hyper)
                if hyper is not None and (self._keeps or state is LayerState.COMPLETE):
                    kept[layer] = hyper
            self.gradients.check(kept)
            self.gradients.step(kept)
        self._forget()
        self._used.update(states)
        for layer in states:
            self.optimizer.set_steps(layer, self.optimizer.steps(layer) + 1)

    def keep_updates(self) -> None:
        """Continue with experts that an unfinished step has updated. The rest of the model does not
        have that update."""
        self.states.catch_up()

    def _check_unchanged(self, rule: UpdateRule) -> None:
        """Raise if the optimizer's numbers have changed: dense parameters use those at step(),
        experts those at backward."""
        if self.states.has_gradients and self._keeps != rule.keep_gradients:
            raise OrderError(
                "clipping (or overlap_updates) was switched between backward and step(); switch it "
                "after step()"
            )
        if self._overwritten:
            raise OrderError(
                "the model's weights were loaded between backward and step(), when the experts had "
                "been updated; load the optimizer's state too, or create a new optimizer"
            )
        for layer, hyper in self._updated_with.items():
            if rule.hyper(layer) != hyper:
                raise OrderError(
                    "the learning rate (or another number of the optimizer) changed between "
                    "backward and step(), when the experts had been updated; change it after "
                    "step(), or set max_grad_norm, which updates them in step()"
                )

    @_exclusive
    def add_replicas(self, replicas: Ranks) -> None:
        """Add to the kept gradients those of the same experts in other nodes, which have computed
        them for other tokens. Entered by all ranks, once in a step."""
        having = self.states.with_gradients()
        has = [layer in having for layer in range(len(self.states))]
        found = replicas.largest([*has, *(not each for each in has)])
        for layer, (some, others) in enumerate(zip(found, found[len(has) :], strict=False)):
            if some and others:
                raise OrderError(
                    f"MoE layer {layer} had a backward on some nodes alone; run the same passes "
                    "on all ranks"
                )
        self.gradients.add_replicas(replicas)

    @_exclusive
    def gradient_squares(self) -> float:
        """Return the sum of squares of the gradients of all local experts in this step; waits for
        them."""
        return self.gradients.sum_of_squares() / self._n_ranks**2

    def waiting_norm(self, layer: int) -> float | None:
        """Return the norm that a layer's placeholder shows; None for a layer without a gradient.
        The lowest of the others has the norm of all gradients that are kept until step(), the rest
        have almost none. As in torch, there is a gradient until zero_grad()."""
        if self.states[layer] is LayerState.EMPTY:
            return ALMOST_ZERO if layer in self._used else None
        lowest = layer == min(self.states.with_gradients())
        return gradient_norm((), self.gradient_squares()) if self._keeps and lowest else ALMOST_ZERO

    @_exclusive
    def discard(self) -> None:
        """Drop the gradients of this step; the experts stay as they are."""
        self.gradients.discard()
        self._forget()

    def weights_loaded(self, layer: int) -> None:
        """Note that the weights of a layer's experts were loaded: an update of this step is
        lost."""
        self._overwritten = self.states.has_updated
        self.states.catch_up(layer)

    def _abort(self) -> None:
        """Drop this step, also if it has updated experts: then their weights must be loaded."""
        if self.states.has_updated and not self._overwritten:
            self.states.abort()
        self.discard()

    @_exclusive
    def restart(self) -> bool:
        """Abort a step that failed, or that has updated experts, because optimizer states are
        loaded; return whether there was one."""
        started = self.states.has_begun
        if started:
            self._abort()
        return started

    @_exclusive
    def zero_grad(self) -> None:
        """Drop kept gradients that were not used."""
        self.states.check_droppable()
        self._without_rule.clear()
        self._used.clear()
        if self.states.has_gradients:
            self.discard()

    @_exclusive
    def drop(self, layer: int) -> None:
        """Drop the gradient of one layer, as `model.zero_grad()` does for each."""
        self._without_rule.discard(layer)
        self._used.discard(layer)
        if self.states[layer] is not LayerState.EMPTY:
            try:
                self.states.check_droppable()
            except OrderError:
                # model.zero_grad() has dropped other gradients before: there is no way back
                if self.gradients.has_updated:
                    self.states.abort()
                raise
            self.gradients.discard(layer)
            self.states[layer] = LayerState.EMPTY

    def check_between_steps(self, what: str) -> None:
        """Raise if experts are one update ahead of the dense parameters, as between backward and
        step()."""
        self.states.check_between_steps(what)

    def _forget(self) -> None:
        self.states.forget()
        self._updated_with.clear()
        self._overwritten = False
        self._without_rule.clear()
