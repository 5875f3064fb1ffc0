"""`overspill.AdamW`: a torch.optim.Optimizer for the dense parameters and the offloaded experts."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError, NonFiniteError
from overspill.core.experts import ExpertId
from overspill.hardware.machine import usable_cores
from overspill.optim.gradient_norm import gradient_norm
from overspill.optim.kernel import AdamHyper, RecordState, adamw_
from overspill.tiers.layout import RecordLayout


class ExpertTraining(Protocol):
    """The training step as the optimizer uses it."""

    def attach(self, rule: "AdamW", state_dtype: torch.dtype) -> None: ...
    def steps(self, layer: int) -> int: ...
    def set_steps(self, layer: int, steps: int) -> None: ...
    def gradient_squares(self) -> float: ...
    def step(self) -> None: ...
    def discard(self) -> None: ...
    def zero_grad(self) -> None: ...
    def restart(self) -> None: ...


class StateRecords(Protocol):
    """The experts' records as the optimizer uses them."""

    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None: ...
    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None: ...


class ExpertEngine(Protocol):
    """The engine as the optimizer uses it."""

    @property
    def training(self) -> ExpertTraining: ...
    @property
    def records(self) -> StateRecords: ...
    @property
    def layout(self) -> RecordLayout: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_experts(self) -> int: ...
    @property
    def overlap_updates(self) -> bool: ...
    def flush(self) -> None: ...


class AdamW(torch.optim.Optimizer):
    """Exact AdamW for dense parameters and offloaded experts.

    `params` is a model, parameters or parameter groups. The experts of a layer belong to the group
    of its placeholder. bf16 parameters have an fp32 master. Without `max_grad_norm` an expert is
    updated during backward, as soon as its gradient is complete. With it, updates start in
    `step()`, when the global norm is known, and overlap the next forward. `state_dtype` is the
    dtype of the moments; the default is the one that `offload` planned.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        max_grad_norm: float | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm={max_grad_norm} must be positive, or None")
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ConfigError(f"state_dtype={state_dtype} must be torch.float32 or torch.bfloat16")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if value < 0:
                raise ConfigError(f"{name}={value} must not be negative")
        if isinstance(params, nn.Module):
            params = list(params.parameters())
        self.max_grad_norm = max_grad_norm
        self.total_norm: float | None = None
        self._scale = 1.0
        self._accumulating = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        placeholders = [(p, group) for p, group in self._parameters() if _is_placeholder(p)]
        self._engine = self._find_engine([p.engine for p, _ in placeholders])
        self._layer_groups = {p.layer: group for p, group in placeholders}
        planned = None if self._engine is None else self._engine.layout.state_dtype
        self.state_dtype = state_dtype or planned or torch.float32
        if self._engine is not None:
            self._engine.training.attach(self, self.state_dtype)

    @staticmethod
    def _find_engine(engines: list[ExpertEngine]) -> ExpertEngine | None:
        if any(engine is not engines[0] for engine in engines):
            raise ConfigError("one AdamW supports one offloaded model; create one AdamW per model")
        return engines[0] if engines else None

    # -- interface for the training step (moe.training_step.UpdateRule) --------------------

    @property
    def keep_gradients(self) -> bool:
        overlap = self._engine is None or self._engine.overlap_updates
        return self.max_grad_norm is not None or not overlap

    @property
    def accumulating(self) -> bool:
        """True inside `accumulate()`, and if accelerate (used by transformers' Trainer) is not at
        the last micro-batch of a step."""
        return self._accumulating or _accelerate_accumulates()

    def hyper(self, layer: int) -> AdamHyper | None:
        group = self._layer_groups.get(layer)
        if group is None:
            return None
        assert self._engine is not None
        return self._hyper(group, self._engine.training.steps(layer) + 1)

    def _hyper(self, group: dict[str, Any], step: int) -> AdamHyper:
        beta1, beta2 = group["betas"]
        return AdamHyper(
            float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step, self._scale
        )

    # -- steps ----------------------------------------------------------------------------

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this context add to the gradients without completing them. Use it for
        all micro-batches of a step except the last."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._scale = self._clip()
        try:
            if self._engine is not None:
                self._engine.training.step()
            for parameter, group in self._dense():
                if parameter.grad is not None:
                    self._step_dense(parameter, group)
        finally:
            self._scale = 1.0
        return loss

    def _parameters(self) -> list[tuple[Any, dict[str, Any]]]:
        """All parameters with their groups, in the order of their numbers in a state dict."""
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def _dense(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, group) for p, group in self._parameters() if not _is_placeholder(p)]

    def _clip(self) -> float:
        """The factor for all gradients, dense and expert, as in torch's clip_grad_norm_."""
        if self.max_grad_norm is None:
            return 1.0
        grads = [p.grad for p, _ in self._dense() if p.grad is not None]
        squares = 0.0 if self._engine is None else self._engine.training.gradient_squares()
        self.total_norm = gradient_norm(grads, squares)
        if not math.isfinite(self.total_norm):
            if self._engine is not None:
                self._engine.training.discard()
            raise NonFiniteError(
                f"the gradient norm is {self.total_norm}; nothing was updated. Lower the learning "
                "rate, or skip this batch"
            )
        return min(1.0, self.max_grad_norm / (self.total_norm + 1e-6))

    def _step_dense(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            if parameter.dtype == torch.bfloat16:
                state["low"] = torch.zeros_like(parameter, dtype=torch.int16)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self.state_dtype)
        state["step"] += 1
        low = state.get("low")
        record = RecordState(
            parameter.view(-1),
            None if low is None else low.view(-1),
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
        )
        assert parameter.grad is not None
        grad = parameter.grad.to(parameter.dtype).reshape(-1)
        adamw_(record, grad, self._hyper(group, state["step"]), usable_cores())
        # the kernel writes through a pointer: autograd must refuse graphs from before this step
        torch.autograd.graph.increment_version(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._engine is not None:
            self._engine.training.zero_grad()  # first: it may refuse, and then nothing is dropped
        super().zero_grad(set_to_none)

    # -- states ---------------------------------------------------------------------------

    @property
    def steps_taken(self) -> int:
        dense = [state["step"] for state in self.state.values() if "step" in state]
        return int(max([0, *dense, *self._layer_steps()]))

    def _layer_steps(self) -> list[int]:
        if self._engine is None:
            return []
        return [self._engine.training.steps(layer) for layer in range(self._engine.n_layers)]

    def expert_sections(self) -> list[tuple[str, torch.dtype]]:
        """Name and dtype of each optimizer state of an expert."""
        if self._engine is None:
            return []
        return [(section.name, section.dtype) for section in self._engine.layout.sections]

    def read_expert_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        assert self._engine is not None
        self._engine.records.read_state(expert, name, out)

    def write_expert_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        assert self._engine is not None
        self._engine.records.write_state(expert, name, value)

    def state_dict(self) -> dict[str, Any]:
        """Like torch's; a layer's experts are one entry of stacked [E, numel] states. It copies all
        of them; checkpoints stream them instead."""
        packed, engine = super().state_dict(), self._engine
        if engine is None:
            return packed
        engine.flush()
        for number, (parameter, _) in enumerate(self._parameters()):
            if not _is_placeholder(parameter) or engine.training.steps(parameter.layer) == 0:
                continue  # as in torch, there are no states before the first update
            entry: dict[str, Any] = {"step": engine.training.steps(parameter.layer)}
            for name, dtype in self.expert_sections():
                stack = torch.empty(engine.n_experts, engine.layout.shape.numel, dtype=dtype)
                for index in range(engine.n_experts):
                    engine.records.read_state(ExpertId(parameter.layer, index), name, stack[index])
                entry[name] = stack
            packed["state"][number] = entry
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict`. Torch's method would cast moments to the parameter's dtype."""
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ConfigError(
                "the optimizer state has other parameter groups; create the same ones"
            )
        if self._engine is not None:
            self._engine.training.restart()
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})
        for number, (parameter, _) in enumerate(self._parameters()):
            entry = state_dict["state"].get(number)
            if entry is None:
                continue
            if _is_placeholder(parameter):
                self._load_experts(parameter.layer, entry)
            else:
                self.state[parameter] = {
                    key: value.to(parameter.device).clone() if isinstance(value, Tensor) else value
                    for key, value in entry.items()
                }

    def _load_experts(self, layer: int, entry: dict[str, Any]) -> None:
        assert self._engine is not None
        self._engine.flush()
        self._engine.training.set_steps(layer, int(entry["step"]))
        for name, _ in self.expert_sections():
            for index in range(self._engine.n_experts):
                self._engine.records.write_state(ExpertId(layer, index), name, entry[name][index])

    def dense_state_dict(self) -> dict[str, Tensor]:
        """The dense states under flat names `number.key`, and the steps of each expert layer."""
        flat = {}
        for number, (parameter, _) in enumerate(self._parameters()):
            for key, value in self.state.get(parameter, {}).items():
                flat[f"{number}.{key}"] = torch.as_tensor(value)
        if self._engine is not None:
            flat["layer_steps"] = torch.tensor(self._layer_steps())
        return flat

    def load_dense_state_dict(self, flat: dict[str, Tensor]) -> None:
        """Loads the result of `dense_state_dict`."""
        if self._engine is not None:
            self._engine.training.restart()
        parameters = self._parameters()
        for name, value in flat.items():
            if name == "layer_steps":
                assert self._engine is not None
                for layer, steps in enumerate(value.tolist()):
                    self._engine.training.set_steps(layer, steps)
                continue
            number, key = name.split(".", 1)
            parameter = parameters[int(number)][0]
            entry = self.state[parameter]
            entry[key] = int(value) if key == "step" else value.to(parameter.device).clone()


def _is_placeholder(parameter: Tensor) -> bool:
    return getattr(parameter, "is_expert_placeholder", False)


def _accelerate_accumulates() -> bool:
    """Whether accelerate, if this process uses it, is before the last micro-batch of a step.
    `step()` completes the gradients in any case."""
    state: Any = sys.modules.get("accelerate.state")
    return state is not None and not state.GradientState().sync_gradients
