"""`overspill.AdamW`: a torch.optim.Optimizer for the dense parameters and the offloaded experts."""

import copy
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError, NonFiniteError, OrderError
from overspill.core.experts import ExpertId
from overspill.optim.arguments import AdamHyper
from overspill.optim.dense import DenseUpdate, DenseUpdates, new_dense_state, new_zeros
from overspill.optim.expert_states import (
    layer_steps,
    load_layer,
    read_layer,
    state_sections,
    steps_of_all_layers,
)
from overspill.optim.gradient_norm import gradient_norm, sum_of_squares
from overspill.optim.interfaces import ExpertEngine
from overspill.optim.parameters import (
    check_dense,
    check_entries,
    check_group,
    check_variant,
    has_experts,
    is_placeholder,
)
from overspill.parallel.dense import average_gradients
from overspill.parallel.ranks import Ranks
from overspill.parallel.sharded import as_sharded, is_sharded, local

EXPERTS_ELSEWHERE = "overspill_experts"
"""Key of a state dict that refers to a file with the states of the experts."""


class AdamW(torch.optim.Optimizer):
    """Exact AdamW for dense parameters and offloaded experts.

    `params` is a model, parameters or parameter groups. The experts of a layer belong to the group
    of its placeholder; if all are frozen, they have no states until they are trained. bf16
    parameters have an fp32 master. Without `max_grad_norm` an expert is updated during backward, as
    soon as its gradient is complete. With it, updates start in `step()`, when the global norm is
    known, and overlap the next forward. `state_dtype` is the dtype of the moments; the default is
    the one that `offload` planned. Gradients are averaged over the ranks of the mesh that the model
    was offloaded with; if `params` lack its experts, give them as `ranks=model.overspill.ranks`.
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
        ranks: Ranks | None = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm={max_grad_norm} must be positive, or None")
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ConfigError(f"state_dtype={state_dtype} must be torch.float32 or torch.bfloat16")
        if isinstance(params, nn.Module):
            params = list(params.parameters())
        self.max_grad_norm = max_grad_norm
        self.total_norm: float | None = None
        self._scale = 1.0
        self._accumulating = False
        self._engine: ExpertEngine | None = None
        self._given_ranks = ranks
        self._layer_groups: dict[int, dict[str, Any]] = {}
        self._given_state_dtype = state_dtype
        self.state_dtype = state_dtype or torch.float32
        self._has_groups = False
        self._dense_updates = DenseUpdates()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_group(defaults)
        super().__init__(params, defaults)
        self._has_groups = True
        self._find_experts()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Experts can be added as well, for example when they are unfrozen."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                if parameter.requires_grad and not is_placeholder(parameter):
                    check_dense(parameter)
            if self._has_groups:  # the constructor adds all its groups first
                self._find_experts()
        except BaseException:
            self.param_groups.pop()
            raise

    def _find_experts(self) -> None:
        """Finds the groups of expert layers, and attaches to the engine of the first experts."""
        placeholders = [(p, group) for p, group in self._parameters() if has_experts(p)]
        engines: list[ExpertEngine] = [p.engine for p, _ in placeholders]
        if any(engine is not engines[0] for engine in engines):
            raise ConfigError("one AdamW supports one offloaded model; create one AdamW per model")
        engine = engines[0] if engines else None
        layer_groups = {p.layer: group for p, group in placeholders}
        if engine is not None and self._engine is None:
            self.state_dtype = self._given_state_dtype or engine.layout.state_dtype
            self._engine = engine  # `keep_gradients` depends on it
            try:
                trained = any(p.requires_grad for p, _ in placeholders)
                dropped = engine.training.attach(self, trained)
            except BaseException:
                self._engine = None
                raise
            if dropped:  # the whole unfinished step, not the part of the experts alone
                super().zero_grad()
        elif engine is not None:
            engine.training.check_joins(layer_groups.keys() - self._layer_groups.keys())
        self._layer_groups = layer_groups

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OrderError(
            "overspill.AdamW cannot be copied or pickled, because it belongs to its parameters and "
            "experts; save its state_dict() and load that into a new one"
        )

    # -- interface for the training step (UpdateRule) --------------------------------------

    @property
    def keep_gradients(self) -> bool:
        overlap = self._engine is None or self._engine.overlap_updates
        return self.max_grad_norm is not None or not overlap or self._replicas is not None

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
        self._check_variants()  # here too: experts may be updated before step()
        # the gradients are sums over the losses of all ranks
        scale = self._scale if self._ranks is None else self._scale / self._ranks.size
        return self._hyper(group, self._engine.training.optimizer.steps(layer) + 1, scale)

    def _hyper(self, group: dict[str, Any], step: int, scale: float) -> AdamHyper:
        beta1, beta2 = group["betas"]
        return AdamHyper(
            float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step, scale
        )

    @property
    def _ranks(self) -> Ranks | None:
        return self._given_ranks if self._engine is None else self._engine.ranks

    @property
    def _replicas(self) -> Ranks | None:
        """The ranks of other nodes that hold the same experts."""
        return None if self._ranks is None else self._ranks.replicas

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

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """`GradScaler.step` asks this first. Experts may be updated during backward, before their
        gradients could be unscaled."""
        if self._engine is not None:
            raise ConfigError(
                "GradScaler does not support offloaded experts: their gradients are never "
                "unscaled; train in bfloat16 or float32, which need no scaler, or create it with "
                "enabled=False"
            )
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_variants()
        for parameter, _ in self._with_gradients():
            check_dense(parameter)
        self._average()
        dense = self._with_gradients()
        for parameter, _ in self._parameters():
            if has_experts(parameter):
                parameter.check_gradient()
        if self._engine is not None and self._replicas is not None:
            self._engine.training.add_replicas(self._replicas)
        self._scale = self._clip()
        try:
            for parameter, _ in dense:  # before anything is updated: memory may be short
                if not self.state.get(parameter):
                    self.state[parameter] = self._dense_state(parameter, {})
            if self._engine is not None:
                with nullcontext() if self._ranks is None else self._ranks.together("step()"):
                    self._engine.training.step()
            updates = [
                DenseUpdate(p, self.state[p], partial(self._hyper, group, scale=self._scale))
                for p, group in dense
            ]
            self._dense_updates.run(updates)
        finally:
            self._scale = 1.0
        return loss

    def _parameters(self) -> list[tuple[Any, dict[str, Any]]]:
        """All parameters with their groups, in the order of their numbers in a state dict."""
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def _dense(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, group) for p, group in self._parameters() if not is_placeholder(p)]

    def _with_gradients(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, group) for p, group in self._dense() if p.grad is not None]

    def _check_variants(self) -> None:
        for group in self.param_groups:
            check_variant(group)

    def _average(self) -> None:
        """Dense gradients become means over ranks, also without experts."""
        ranks = self._ranks
        if ranks is None:
            return
        if self._engine is not None:
            self._engine.training.prepare_step()
        keys = ("lr", "betas", "eps", "weight_decay")
        numbers = [{key: group[key] for key in keys} for group in self.param_groups]
        dense = [p for p, _ in self._dense() if not is_sharded(p)]  # backward averages those
        average_gradients(ranks, dense, (self.max_grad_norm, numbers))

    def _clip(self) -> float:
        """The factor for all gradients, dense and expert, as in torch's clip_grad_norm_."""
        if self.max_grad_norm is None:
            return 1.0
        found = [p.grad for p, _ in self._with_gradients() if p.grad is not None]
        grads = [grad for grad in found if not is_sharded(grad)]
        squares = 0.0 if self._engine is None else self._engine.training.gradient_squares()
        if self._ranks is not None:
            parts = [local(grad) for grad in found if is_sharded(grad)]
            squares, of_parts = self._ranks.sums([squares, sum_of_squares(parts)])
            squares = squares / self._ranks.copies + of_parts
        self.total_norm = gradient_norm(grads, squares)
        if not math.isfinite(self.total_norm):
            if self._engine is not None:
                self._engine.training.discard()
            raise NonFiniteError(
                f"the gradient norm is {self.total_norm}; nothing was updated. Lower the learning "
                "rate, or skip this batch"
            )
        return min(1.0, self.max_grad_norm / (self.total_norm + 1e-6))

    def _dense_state(self, parameter: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
        zeros = new_zeros if self._engine is None else self._engine.dense.new_state
        return new_dense_state(parameter, given, self.state_dtype, zeros)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch, but experts never have gradients of zeros: theirs are dropped."""
        if self._engine is not None:
            self._engine.training.zero_grad()  # first: it may refuse
        super().zero_grad(set_to_none)

    # -- states ---------------------------------------------------------------------------

    @property
    def steps_taken(self) -> int:
        dense = [state["step"] for state in self.state.values() if "step" in state]
        experts = [] if self._engine is None else layer_steps(self._engine)
        return int(max([0, *dense, *experts]))

    def expert_sections(self) -> list[tuple[str, torch.dtype]]:
        """Name and dtype of each optimizer state of an expert; frozen experts have none."""
        return [] if self._engine is None else state_sections(self._engine)

    def allocate_expert_states(self) -> None:
        """Before they are loaded, also for frozen experts."""
        if self._engine is not None:
            self._engine.training.optimizer.allocate_states()

    def read_expert_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        assert self._engine is not None
        self._engine.records.read_state(expert, name, out)

    def write_expert_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        assert self._engine is not None
        self._engine.records.write_state(expert, name, value)

    def state_dict(self) -> dict[str, Any]:
        """Like torch's; a layer's experts are one entry of stacked [E, numel] states. With experts
        all states are copies in host memory; checkpoints stream them instead."""
        packed, engine = super().state_dict(), self._engine
        if engine is None:
            return packed
        if any(layer_steps(engine)):
            engine.check_whole("the optimizer's state_dict()")
        engine.training.check_between_steps("saved")
        engine.flush()
        packed["state"] = {
            number: {
                key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in entry.items()
            }
            for number, entry in packed["state"].items()
        }
        for number, (parameter, _) in enumerate(self._parameters()):
            # as in torch, there are no states before the first update
            if has_experts(parameter) and engine.training.optimizer.steps(parameter.layer) > 0:
                packed["state"][number] = read_layer(engine, parameter.layer)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict`, as torch does: a parameter without an entry has no state after
        it. Moments are converted to `state_dtype`, where torch's method would convert them to the
        parameter's dtype."""
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ConfigError(
                "the optimizer state has other parameter groups; create the same ones"
            )
        numbers = [number for group in saved for number in group["params"]]
        entries = [state_dict["state"].get(number) for number in numbers]
        check_entries([parameter for parameter, _ in self._parameters()], entries)
        for other in saved:
            check_group({**self.defaults, **other})
        pairs = zip(self._parameters(), entries, strict=True)
        if self._engine is not None and any(
            has_experts(parameter) and entry and entry["step"] for (parameter, _), entry in pairs
        ):
            self._engine.training.optimizer.check_planned()
        self._restart()
        for group, other in zip(self.param_groups, saved, strict=True):
            values = {key: value for key, value in other.items() if key != "params"}
            kept = {key: group[key] for key in ("param_names", "params") if key in group}
            group.clear()
            group.update(self.defaults | kept | copy.deepcopy(values))
        self._set_dense_states(entries)
        self._load_experts(state_dict, entries)

    def _restart(self) -> None:
        """A step that failed, or that has updated experts, is dropped as a whole."""
        if self._engine is not None and self._engine.training.restart():
            super().zero_grad()

    def _set_dense_states(self, entries: list[Any]) -> None:
        self.state = defaultdict(dict)
        for (parameter, _), entry in zip(self._parameters(), entries, strict=True):
            if entry and not is_placeholder(parameter):
                self.state[parameter] = self._dense_state(parameter, entry)

    def _load_experts(self, state_dict: dict[str, Any], entries: list[Any]) -> None:
        if EXPERTS_ELSEWHERE in state_dict:
            raise ConfigError(
                "this optimizer state refers to a file with the states of the experts; load it "
                "with the Trainer that wrote it (resume_from_checkpoint)"
            )
        if self._engine is None:
            return
        self._engine.flush()
        for (parameter, _), entry in zip(self._parameters(), entries, strict=True):
            if has_experts(parameter):
                load_layer(self._engine, parameter.layer, entry or {"step": 0})

    def dense_state_dict(self) -> dict[str, Tensor]:
        """The dense states under flat names `number.key`, and the steps of each expert layer."""
        flat = {}
        for number, (parameter, _) in enumerate(self._parameters()):
            for key, value in self.state.get(parameter, {}).items():
                is_part = isinstance(value, Tensor)
                flat[f"{number}.{key}"] = (
                    as_sharded(value, parameter) if is_part else torch.as_tensor(value)
                )
        if self._engine is not None:
            flat["layer_steps"] = torch.tensor(steps_of_all_layers(self._engine))
        return flat

    def load_dense_state_dict(self, flat: dict[str, Tensor]) -> None:
        """Restores the result of `dense_state_dict`."""
        self._restart()
        entries: list[dict[str, Tensor]] = [{} for _ in self._parameters()]
        for name, value in flat.items():
            if name == "layer_steps":
                assert self._engine is not None
                for layer, in_model in enumerate(self._engine.layer_map.own):
                    self._engine.training.optimizer.set_steps(layer, int(value[in_model]))
                continue
            number, key = name.split(".", 1)
            entries[int(number)][key] = value
        self._set_dense_states(entries)


def _accelerate_accumulates() -> bool:
    """Whether accelerate, if this process uses it, is before the last micro-batch of a step.
    `step()` completes the gradients in any case."""
    state: Any = sys.modules.get("accelerate.state")
    return state is not None and not state.GradientState().sync_gradients
