"""Everything on the compute device: no slots, no host traffic, updates on the device."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.core.experts import ExpertId, Phase
from overspill.core.sizes import format_size
from overspill.hardware.machine import usable_cores
from overspill.moe.engine import Engine, UpdateRule
from overspill.moe.passes import LayerPass, Wave, sum_of_squares
from overspill.moe.settings import Settings
from overspill.optim.kernel import AdamHyper, RecordState, adamw_
from overspill.plan.budget import Placement
from overspill.plan.waves import Candidate, next_wave
from overspill.tiers.layout import RecordLayout
from overspill.trace.recorder import Recorder
from overspill.transfer.requests import run_all


class ResidentEngine(Engine):
    """Records lie side by side in the device's memory, so a whole layer is one wave and the update
    of a wave is one launch."""

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
        super().__init__(n_layers, n_experts, layout, device, placement, settings, recorder)
        self._size = (n_layers * n_experts, layout.shape.numel)
        self.weights = torch.zeros(self._size, dtype=layout.dtype, device=device)
        self.states: dict[str, Tensor] = {}
        self.grads: Tensor | None = None
        self.squares = torch.zeros(n_layers * n_experts, device=device)
        self.threads = settings.threads or usable_cores()
        self._kept: set[int] = set()  # numbers of experts that hold a kept gradient of this step
        self._updated: set[int] = set()  # numbers of experts updated during this step's backward

    # -- waves ----------------------------------------------------------------------------

    def needs_counts(self, rows: int) -> bool:
        # one wave takes the whole layer if its activations fit: then the host need not know
        return (
            self.device.type == "cpu" or rows > self.placement.max_rows or not self.settings.waves
        )

    def waves(self, layer_pass: LayerPass, phase: Phase) -> Iterator[Wave]:
        layer, counts = layer_pass.layer, layer_pass.counts
        self._check_pass(layer)
        permutation = layer_pass.permutation
        assert permutation is not None
        base = layer * self.n_experts
        if not counts:
            records = self.weights[base : base + self.n_experts]
            rows = permutation.n_rows
            yield Wave(0, self.n_experts, 0, rows, records, permutation.ends_E, None)
            return
        starts = [0, *itertools.accumulate(counts)]
        pending = [
            Candidate(index, base + index, starts[index], count, True, True)
            for index, count in enumerate(counts)
            if count
        ]
        while pending:
            number = next_wave(pending, self.placement.max_rows, self.settings.waves)
            first, stop = pending[0].index, pending[number - 1].index + 1
            yield Wave(
                first,
                stop,
                starts[first],
                starts[stop],
                self.weights[base + first : base + stop],
                permutation.ends_E[first:stop] - starts[first],
                counts[first:stop],
            )
            pending = pending[number:]

    # -- gradients ------------------------------------------------------------------------

    def deliver(self, layer_pass: LayerPass, wave: Wave, dw: Sequence[Tensor]) -> None:
        assert self.rule is not None
        layer = layer_pass.layer
        base = layer * self.n_experts
        first, stop = base + wave.first, base + wave.stop
        grad = torch.cat([part.flatten(1) for part in dw], dim=1).to(self.dtype)
        keep = self.rule.keep_gradients or not self.is_final(layer)
        if keep or any(number in self._kept for number in range(first, stop)):
            self._keep(grad, first, stop)
            return
        self._note_squares(grad, first, stop)
        hyper = self.rule.hyper(layer)
        if hyper is not None:
            self._update(first, stop, grad, hyper)
        self._updated.update(range(first, stop))

    def _note_squares(self, grad: Tensor, first: int, stop: int) -> None:
        norms = torch.linalg.vector_norm(grad, dim=1, dtype=torch.float32)
        self.squares[first:stop] = norms.square()
        # The first gradient of a step shows a NaN loss before anything is updated with it; the
        # others are looked at in step(), where the device is waited for anyway.
        if not self._updated and not math.isfinite(self.squares[first:stop].sum().item()):
            self.discard()
            raise self._not_finite()

    def _keep(self, grad: Tensor, first: int, stop: int) -> None:
        if self.grads is None:
            self.grads = torch.zeros(self._size, dtype=self.dtype, device=self.device)
        for number in range(first, stop):
            if number in self._kept:
                self.grads[number] += grad[number - first]
            else:
                self.grads[number].copy_(grad[number - first])
                self._kept.add(number)

    def _complete(self, layer: int, counts: Sequence[int]) -> None:
        assert self.rule is not None
        if not self.rule.keep_gradients:
            if not self._updated:
                self._check_kept()
            self._update_layer(layer)

    def _update_layer(self, layer: int) -> None:
        """Kept gradients and decay for every expert that was not updated during backward."""
        assert self.rule is not None
        hyper = self.rule.hyper(layer)
        if hyper is None:
            return
        base = layer * self.n_experts
        for number in range(base, base + self.n_experts):
            if number not in self._updated:
                kept = (
                    self.grads[number] if number in self._kept and self.grads is not None else None
                )
                self._update(number, number + 1, kept, hyper)
        self._updated.update(range(base, base + self.n_experts))

    def _update(self, first: int, stop: int, grad: Tensor | None, hyper: AdamHyper) -> None:
        low = self.states.get("low")
        state = RecordState(
            self.weights[first:stop].view(-1),
            None if low is None else low[first:stop].view(-1),
            self.states["exp_avg"][first:stop].view(-1),
            self.states["exp_avg_sq"][first:stop].view(-1),
        )
        adamw_(state, None if grad is None else grad.view(-1), hyper, self.threads)

    # -- the end of a step ----------------------------------------------------------------

    def attach(self, rule: UpdateRule, state_dtype: torch.dtype) -> None:
        if self._attach(rule):
            self._kept.clear()
            self._updated.clear()
            for state in self.states.values():
                state.zero_()
        if not self.states:
            self.layout = RecordLayout(self.shape, self.dtype, state_dtype)
            self.states = {
                section.name: torch.zeros(self._size, dtype=section.dtype, device=self.device)
                for section in self.layout.sections
            }
        if rule.keep_gradients and self.grads is None:
            self.grads = torch.zeros(self._size, dtype=self.dtype, device=self.device)

    def gradient_squares(self) -> float:
        if self.grads is None or not self._kept:
            return 0.0
        numbers = torch.tensor(sorted(self._kept), device=self.device)
        # part by part, as streamed gradients are: the norm has the same bits in every mode
        sizes = [math.prod(size) for size in self.shape.sizes]
        squares = [
            sum_of_squares(self.grads[piece].split(sizes, dim=1))
            for piece in numbers.split(self.n_experts)
        ]
        return float(torch.cat(squares).double().sum().item())

    def _check_kept(self) -> None:
        """Before the first update with kept gradients; once a step, because it waits for the
        device."""
        if not math.isfinite(self.gradient_squares()):
            self.discard()
            raise self._not_finite()

    def _apply(self, layers: Sequence[int]) -> None:
        assert self.rule is not None
        if self.rule.keep_gradients:
            self._check_kept()
            for layer in layers:
                self._update_layer(layer)
        finite = not self._updated or math.isfinite(self.squares.sum().item())
        self._kept.clear()
        self._updated.clear()
        if not finite:
            self._forget_step()
            raise self._not_finite()

    def _not_finite(self) -> NonFiniteError:
        self.squares.zero_()  # told once: the next step starts clean
        return NonFiniteError(
            "an expert's gradient is NaN or infinite; lower the learning rate or set "
            "max_grad_norm, and go on from the last checkpoint"
        )

    def discard(self) -> None:
        self._kept.clear()
        self._updated.clear()
        self._forget_step()

    # -- records --------------------------------------------------------------------------

    def _number(self, expert: ExpertId) -> int:
        return expert.layer * self.n_experts + expert.index

    def fill(
        self, fill: Callable[[ExpertId, Tensor], None], workers: int = 1, on_host: bool = False
    ) -> None:
        own = threading.local()

        def fill_one(expert: ExpertId) -> None:
            if not on_host:
                fill(expert, self.weights[self._number(expert)])
                return
            if not hasattr(own, "record"):
                own.record = torch.empty(self.shape.numel, dtype=self.dtype)
            fill(expert, own.record)
            self.weights[self._number(expert)].copy_(own.record)

        run_all(fill_one, self.experts(), workers)

    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        self._check_open()
        out.copy_(self.weights[self._number(expert)])

    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        self._check_open()
        fill(self.weights[self._number(expert)])
        if "low" in self.states:
            # the master is the new weight, without low bits of the old one
            self.states["low"][self._number(expert)].zero_()

    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        self._check_open()
        out.copy_(self.states[name][self._number(expert)])

    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        self._check_open()
        self.states[name][self._number(expert)].copy_(value)

    # -- life -----------------------------------------------------------------------------

    def flush(self) -> None:
        self._check_open()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check_conserved(self) -> None:
        self.flush()

    def bytes_by_tier(self) -> dict[str, int]:
        tensors = [self.weights, *self.states.values()]
        if self.grads is not None:
            tensors.append(self.grads)
        return {"gpu": sum(tensor.nbytes for tensor in tensors), "host": 0, "disk": 0}

    def describe(self) -> str:
        size = format_size(self.bytes_by_tier()["gpu"])
        return (
            f"mode gpu: all {len(self.weights)} experts and their states on {self.device} ({size})"
        )

    def close(self) -> None:
        if self._closed:
            return
        self.flush()
        self._closed = True
        self.weights = self.weights.new_empty(0, self.shape.numel)  # a slice would keep it all
        self.states.clear()
        self.grads = None
        self._lift_budget()
