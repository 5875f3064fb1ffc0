"""The optimizer of the experts, as a training step sees it."""

import weakref
from contextlib import AbstractContextManager

from overspill.core.errors import OrderError
from overspill.core.interrupt import DeferredInterrupt
from overspill.moe.gradients import ExpertGradients
from overspill.optim.interfaces import UpdateRule


class AttachedOptimizer:
    """The optimizer that updates the experts, the memory for its states, and update counts of the
    layers. A part of `TrainingStep`, which attaches optimizers."""

    def __init__(
        self, gradients: ExpertGradients, planned: bool, lock: AbstractContextManager[object]
    ) -> None:
        """`planned` says whether there is memory for gradients and optimizer states. `lock` is held
        while memory is allocated."""
        self._gradients = gradients
        self._planned = planned
        self._lock = lock
        self._rule: weakref.ref[UpdateRule] | None = None
        self._has_memory = False  # for the states of this optimizer
        self._steps: dict[int, int] = {}  # of the layers whose optimizer states may not be zero

    @property
    def rule(self) -> UpdateRule | None:
        """The optimizer, while something else holds it: the step must not keep it, and with it the
        model, alive."""
        return None if self._rule is None else self._rule()

    def attach(self, rule: UpdateRule, trained: bool) -> bool:
        """Follow `rule` from now on; return whether it replaces a deleted optimizer. Only `trained`
        experts need memory."""
        if self.rule is not None and self.rule is not rule:
            raise OrderError(
                "the model has an optimizer already; use its parameter groups, or delete it first"
            )
        if trained:
            self.check_planned()
        replaces = self._rule is not None
        self._rule, self._has_memory = weakref.ref(rule), False
        if trained:
            self.allocate_states()
        return replaces

    def allocate_states(self) -> None:
        """Allocate memory for the optimizer, once: experts that were frozen will be trained, or
        their states are loaded."""
        with self._lock:
            rule = self.rule
            assert rule is not None
            self.check_planned()
            if not self._has_memory:
                with DeferredInterrupt():  # while threads are started
                    self._gradients.attach(rule.state_dtype, rule.keep_gradients)
                    self._has_memory = True

    def check_planned(self) -> None:
        """Raise if experts that are to be trained were frozen when the model was offloaded."""
        if not self._planned:
            raise OrderError(
                "the experts were frozen when the model was offloaded, so no memory is planned for "
                "their gradients and optimizer states; call requires_grad_(True) before "
                "overspill.offload (or leave freeze_experts out of overspill.load), or freeze them "
                "again"
            )

    @property
    def has_states(self) -> bool:
        """Whether there is an optimizer, and memory for its states."""
        return self.rule is not None and self._has_memory

    @property
    def updates_at_once(self) -> bool:
        """Whether a backward that runs now would update experts before step()."""
        rule = self.rule if self._has_memory else None
        return rule is not None and not rule.keep_gradients and not rule.accumulating

    # -- states and steps -----------------------------------------------------------------------

    def reset_states(self) -> None:
        """Set the states of all layers to zero, as before the first step."""
        self._gradients.reset_states()
        self._steps.clear()

    def is_fresh(self, layer: int) -> bool:
        """Whether the states of a layer are as before its first update."""
        return layer not in self._steps or not self._has_memory

    def steps(self, layer: int) -> int:
        """Number of updates of a layer so far, for the bias correction."""
        return self._steps.get(layer, 0)

    def set_steps(self, layer: int, steps: int) -> None:
        """Set the number of updates of a layer: its states are loaded, or it was updated."""
        self._steps[layer] = steps

    def begin_update(self, layer: int) -> None:
        """Note that the states of a layer are not zero any more, whatever becomes of the step."""
        self._steps.setdefault(layer, 0)
