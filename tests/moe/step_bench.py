"""A training step with a fake sink, a fake optimizer and no experts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.core.experts import ExpertId, ExpertShape
from overspill.moe.dispatch import RoutedRows
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.records import ExpertRecords
from overspill.moe.training_step import TrainingStep
from overspill.optim.arguments import AdamHyper
from overspill.tiers.layout import RecordLayout

N_LAYERS = 2
COUNTS = [2, 0]


class FakeSink:
    """Stands for `ExpertGradients` and records its calls. `fail_in` is the method that finds a
    gradient that is not finite."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.fail_in = ""
        self._updated = False

    def _record(self, name: str, *args: object) -> None:
        self.log.append((name, *args))
        if self.fail_in == name:
            self._updated = False
            raise NonFiniteError("not finite")

    def attach(self, state_dtype: torch.dtype, keep: bool) -> None:
        self._record("attach", keep)

    def reset_states(self) -> None:
        self._record("reset_states")

    def expect_more(self) -> None:
        """Memory is not simulated."""

    def add(
        self,
        layer: int,
        wave: Wave,
        dw: Sequence[Tensor],
        hyper: AdamHyper | None,
        more: bool = False,
    ) -> None:
        self._record("add", layer, hyper is not None)
        self._updated = self._updated or hyper is not None

    def complete(self, layer: int, counts: Sequence[int] | None, hyper: AdamHyper | None) -> None:
        self._record("complete", layer, counts, hyper is not None)
        self._updated = self._updated or hyper is not None

    @property
    def has_updated(self) -> bool:
        return self._updated

    def sum_of_squares(self) -> float:
        return 9.0

    def check(self, kept: Mapping[int, AdamHyper]) -> None:
        """No gradient is checked."""

    def step(self, kept: Mapping[int, AdamHyper]) -> None:
        self._updated = False
        self._record("step", sorted(kept))

    def discard(self, layer: int | None = None) -> None:
        self._updated = self._updated and layer is not None
        self._record("discard", *(() if layer is None else (layer,)))


class NoRecords(ExpertRecords):
    def __init__(self) -> None:
        self.n_changes = 0  # there is no store

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout(ExpertShape(8, 4, gated=False), torch.float32)

    def fill(self, *_: object, **__: object) -> None: ...
    def read_weights(self, expert: ExpertId, out: Tensor) -> None: ...
    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None: ...
    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None: ...
    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None: ...


@dataclass
class FakeRule:
    """An optimizer; it has the experts of `layers`."""

    training: TrainingStep
    keep_gradients: bool = False
    state_dtype: torch.dtype = torch.float32
    accumulating: bool = False
    lr: float = 0.1
    layers: tuple[int, ...] = (0, 1)

    def hyper(self, layer: int) -> AdamHyper | None:
        if layer not in self.layers:
            return None
        return AdamHyper(self.lr, 0.9, 0.99, 1e-8, 0.0, self.training.optimizer.steps(layer) + 1)


class Bench:
    def __init__(self, keep: bool = False, attach: bool = True) -> None:
        self.sink, self.records = FakeSink(), NoRecords()
        self.training = TrainingStep(N_LAYERS, self.sink, self.records)
        self.rule = FakeRule(self.training, keep_gradients=keep)
        if attach:
            self.training.attach(self.rule, trained=True)
            self.sink.log.clear()

    def forward(self, layer: int = 0) -> LayerPass:
        self.training.states.check_forward(layer)
        layer_pass = LayerPass(layer, training=True, order=RoutedRows(2, False, COUNTS))
        self.training.passes.open(layer_pass)
        return layer_pass

    def deliver(self, layer_pass: LayerPass) -> None:
        nothing = torch.empty(0)
        self.training.deliver(layer_pass, Wave(0, 2, 0, 2, nothing, nothing, COUNTS), [])

    def backward(self, layer_pass: LayerPass, accumulate: bool = False) -> None:
        self.rule.accumulating = accumulate
        try:
            if self.training.begin_backward(layer_pass):
                self.deliver(layer_pass)
                self.training.end_backward(layer_pass)
        finally:
            self.rule.accumulating = False

    def fail_backward(self, accumulate: bool = False) -> None:
        """A backward that ends after its first wave."""
        layer_pass = self.forward()
        self.rule.accumulating = accumulate
        self.training.begin_backward(layer_pass)
        self.deliver(layer_pass)
        self.rule.accumulating = False

    def sink_calls(self) -> list[tuple[Any, ...]]:
        """The calls of the sink since this was last called."""
        log, self.sink.log = self.sink.log, []
        return log
