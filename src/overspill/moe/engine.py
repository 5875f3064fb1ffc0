"""The engine holds the experts of all MoE layers and carries plans out. Two kinds: all of it on the
compute device (`resident`), or streamed through slots from host memory and disk (`streaming`)."""

import abc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from overspill.compute.permute import Permutation
from overspill.core.errors import OrderError
from overspill.core.experts import ExpertId, ExpertShape, Phase
from overspill.moe.passes import HostWork, LayerPass, Promise, Wave
from overspill.moe.settings import Settings
from overspill.optim.kernel import AdamHyper
from overspill.plan.budget import Placement
from overspill.tiers.layout import RecordLayout
from overspill.trace.recorder import Recorder


class UpdateRule(Protocol):
    """What the engine asks its optimizer."""

    @property
    def keep_gradients(self) -> bool:
        """Whether updates wait for step(), because of clipping or without overlap."""

    @property
    def accumulating(self) -> bool:
        """Whether the backward of now is not the last of its step."""

    def hyper(self, layer: int) -> AdamHyper | None:
        """The next update of a layer's experts; None if they are not trained."""


class Engine(abc.ABC):
    """What layers, optimizer and checkpoints see of the experts."""

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        layout: RecordLayout,
        device: torch.device,
        placement: Placement,
        settings: Settings,
        recorder: Recorder,
    ) -> None:
        self.n_layers = n_layers
        self.n_experts = n_experts
        self.device = device
        self.placement = placement
        self.settings = settings
        self.recorder = recorder
        self.layout = layout
        self._rule: weakref.ref[UpdateRule] | None = None
        self._closed = False
        self.gates: list[Tensor | None] = [None] * n_layers  # weights of routers, if known
        self.saved_to: Path | None = None  # the folder that holds the weights of now, if one does
        self.layer_steps = [0] * n_layers  # updates of each layer so far, for bias correction
        # passes whose backward is still to come; sets, because adding and removing is atomic and
        # the garbage collector may drop a graph in any thread
        self._open: list[set[Promise]] = [set() for _ in range(n_layers)]
        self._step_keeps = False  # whether this step's gradients wait for step()
        self._final: set[int] = set()  # layers whose gradient of this step is complete
        self._gathered: set[int] = set()  # layers that hold part of this step's gradient
        self._updated_with: dict[int, AdamHyper] = {}  # layers updated during backward, and how

    @property
    def shape(self) -> ExpertShape:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def rule(self) -> UpdateRule | None:
        """The optimizer, as long as somebody holds it: the engine must not keep it (and with it
        the model) alive."""
        return None if self._rule is None else self._rule()

    @property
    def overlap_updates(self) -> bool:
        return self.settings.overlap_updates

    @property
    def accumulating(self) -> bool:
        return self.rule is not None and self.rule.accumulating

    @property
    def expert_parameters(self) -> int:
        return self.n_layers * self.n_experts * self.shape.numel

    # -- what a layer calls ---------------------------------------------------------------

    def route(
        self, layer_pass: LayerPass, x_TD: Tensor, expert_ids_TK: Tensor, phase: Phase
    ) -> None:
        """Enters a layer with its routing: sorts the rows, and plans who computes them."""
        permutation = Permutation.build(expert_ids_TK, self.n_experts)
        layer_pass.permutation = permutation
        if layer_pass.drops or self.needs_counts(permutation.n_rows):
            layer_pass.counts = permutation.counts_E.tolist()

    def reroute(self, layer_pass: LayerPass) -> None:
        """Enters the layer again for the backward of a pass; the plan may be another one."""
        return

    def host_forward(self, layer_pass: LayerPass, x_TD: Tensor) -> HostWork | None:
        """Begins the forward of the experts that the CPU computes, if there are any."""
        return None

    def host_backward(
        self,
        layer_pass: LayerPass,
        x_TD: Tensor,
        dy_TD: Tensor,
        weights_TK: Tensor,
        need_dw: bool,
    ) -> HostWork | None:
        """The same for their backward; it delivers their gradients too."""
        return None

    @abc.abstractmethod
    def waves(self, layer_pass: LayerPass, phase: Phase) -> Iterator[Wave]:
        """Yields the layer's experts as they are on the device; compute a wave before the next."""

    @abc.abstractmethod
    def deliver(self, layer_pass: LayerPass, wave: Wave, dw: Sequence[Tensor]) -> None:
        """Takes the gradients of a wave, [n, ...] for each tensor of a record."""

    @abc.abstractmethod
    def needs_counts(self, rows: int) -> bool:
        """Whether the plan depends on the counts, so that the host must wait for them."""

    def open_pass(self, layer_pass: LayerPass) -> None:
        """A forward whose backward will come (or whose graph will be thrown away)."""
        promises = self._open[layer_pass.layer]
        promises.add(layer_pass.promise)
        weakref.finalize(layer_pass, promises.discard, layer_pass.promise)

    def begin_backward(self, layer_pass: LayerPass) -> bool:
        """Before the first wave of a layer's backward; whether weight gradients are wanted."""
        layer = layer_pass.layer
        if not layer_pass.trained:
            self._open[layer].discard(layer_pass.promise)
            return False
        if self.rule is None:
            raise OrderError(
                "backward through offloaded experts needs their optimizer: create "
                "overspill.AdamW(model, lr=...) before the first backward"
            )
        if layer_pass.promise not in self._open[layer] or layer in self._final:
            raise OrderError(
                f"MoE layer {layer} got a second backward before step(); call opt.step() after "
                "each backward, or wrap all but the last in `with opt.accumulate():`"
            )
        self._open[layer].discard(layer_pass.promise)
        hyper = self.rule.hyper(layer)
        if hyper is None:
            return False
        # from here on the layer may hold gradients, even if this backward should fail half-way
        self._gathered.add(layer)
        self._step_keeps = self.rule.keep_gradients
        if self.is_final(layer) and not self.rule.keep_gradients:
            self._updated_with[layer] = hyper
        return True

    def is_final(self, layer: int) -> bool:
        """Whether the gradient being delivered completes the layer's gradient of this step."""
        return not self.accumulating and not self._open[layer]

    def end_backward(self, layer_pass: LayerPass) -> None:
        """After the last wave: experts without tokens get their decay, the layer is complete."""
        layer = layer_pass.layer
        if layer in self._gathered and self.is_final(layer):
            self._final.add(layer)
            self._complete(layer, layer_pass.counts)

    @abc.abstractmethod
    def _complete(self, layer: int, counts: Sequence[int]) -> None:
        """The layer's gradient is complete; `counts` are the tokens of the last pass."""

    # -- what the optimizer calls ---------------------------------------------------------

    @abc.abstractmethod
    def attach(self, rule: UpdateRule, state_dtype: torch.dtype) -> None:
        """Takes the memory for optimizer states (once) and follows `rule` from now on."""

    @abc.abstractmethod
    def gradient_squares(self) -> float:
        """Sum of squares of all expert gradients of this step; waits for them."""

    def waiting_norm(self, layer: int) -> Tensor | None:
        """The norm of all gradients that wait for step(), for the lowest layer that has some."""
        if not self._step_keeps or layer != min(self._gathered, default=None):
            return None
        return torch.tensor([math.sqrt(self.gradient_squares())], device=self.device)

    def step(self) -> None:
        """Ends a step: kept gradients, if the rule keeps them, update the experts now."""
        self._check_unchanged()
        self.saved_to = None
        for layer in sorted(self._gathered - self._final):
            # a pass was thrown away, or every backward ran under accumulate(): complete it here
            self._final.add(layer)
            self._complete(layer, [0] * self.n_experts)
        self._apply(sorted(self._final))
        for layer in self._final:
            self.layer_steps[layer] += 1
        self._forget_step()

    def _check_unchanged(self) -> None:
        """Dense parameters take the numbers of now, the experts took those of backward."""
        if (
            self._gathered
            and self.rule is not None
            and self._step_keeps != self.rule.keep_gradients
        ):
            raise OrderError(
                "clipping (or overlap_updates) was switched between backward and step(); switch it "
                "after step()"
            )
        for layer, hyper in self._updated_with.items():
            if self.rule is not None and self.rule.hyper(layer) != hyper:
                raise OrderError(
                    "the learning rate (or another number of the optimizer) changed between "
                    "backward and step(), when the experts had been updated; change it after "
                    "step(), or set max_grad_norm, which updates them in step()"
                )

    @abc.abstractmethod
    def _apply(self, layers: Sequence[int]) -> None:
        """Updates the experts of `layers`, if they were not updated during backward."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Throws the kept gradients of this step away; the experts stay as they are."""

    def discard_pending(self) -> None:
        """What zero_grad() means for experts: gradients that were kept and not used are dropped."""
        if self._updated_with:
            raise OrderError(
                "zero_grad() after backward without step(): the experts were updated during "
                "backward already; call step() first, or set max_grad_norm (or overlap_updates="
                "False), which keeps gradients until step()"
            )
        if self._final or self._gathered:
            self.discard()

    def check_between_steps(self, what: str) -> None:
        """Between backward and step() experts may be of the next step, and all else is not."""
        if self._updated_with:
            raise OrderError(
                f"the model cannot be {what} between backward and step(): its experts were updated "
                "during backward, the rest was not; call opt.step() first"
            )

    def _forget_step(self) -> None:
        self._final.clear()
        self._gathered.clear()
        self._updated_with.clear()

    def _check_pass(self, layer: int) -> None:
        """A pass between a layer's backward and step() would see weights of neither step."""
        self._check_open()
        if layer in self._final:
            raise OrderError(
                "forward after backward without step(): call opt.step() after each backward (or, "
                "with clipping, opt.zero_grad() to drop the gradients), or wrap the backward of "
                "all micro-batches but the last in `with opt.accumulate():`"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise OrderError("the engine is closed and its experts are gone; load the model again")

    def _attach(self, rule: UpdateRule) -> bool:
        """Follows `rule` from now on; whether it takes over from one that is gone."""
        self._check_open()
        if not self.placement.training:
            raise OrderError(
                "the model was offloaded for inference; call model.train() before offload() (a "
                "model of from_pretrained() is in evaluation mode) to plan memory for an optimizer"
            )
        if self.rule is not None and self.rule is not rule:
            raise OrderError(
                "the model has an optimizer already; use its parameter groups, or delete it first"
            )
        again = self._rule is not None
        self._rule = weakref.ref(rule)
        if again:
            self.layer_steps[:] = [0] * self.n_layers
            self._forget_step()
        return again

    # -- records, for checkpoints ---------------------------------------------------------

    @property
    def weights_bytes(self) -> int:
        return self.n_layers * self.n_experts * self.layout.weight_bytes

    def experts(self) -> Iterator[ExpertId]:
        for layer in range(self.n_layers):
            for index in range(self.n_experts):
                yield ExpertId(layer, index)

    @abc.abstractmethod
    def fill(
        self, fill: Callable[[ExpertId, Tensor], None], workers: int = 1, on_host: bool = False
    ) -> None:
        """Before the first use: lets `fill` set the flat weights [numel] of every expert, in so
        many threads, where they will live; in a buffer for those that will live on disk and, if
        `fill` can only write to host memory (`on_host`), for those on the device."""

    @abc.abstractmethod
    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        """Copies an expert's flat weights into `out` [numel]."""

    @abc.abstractmethod
    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        """Lets `fill` set an expert's flat weights [numel] in place."""

    @abc.abstractmethod
    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        """Copies one optimizer state of an expert into `out` [numel]."""

    @abc.abstractmethod
    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        """Sets one optimizer state of an expert."""

    # -- life -----------------------------------------------------------------------------

    @abc.abstractmethod
    def flush(self) -> None:
        """Waits until every update has landed."""

    @abc.abstractmethod
    def check_conserved(self) -> None:
        """When idle: every slot, row and buffer is accounted for."""

    @abc.abstractmethod
    def bytes_by_tier(self) -> dict[str, int]:
        """What the experts take on the compute device, in host memory and on disk."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line: the mode and what lies where."""

    def _lift_budget(self) -> None:
        """The allocator's limit was this engine's budget."""
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all threads and gives the memory back; the experts are gone."""
