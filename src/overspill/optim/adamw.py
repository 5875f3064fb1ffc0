"""`overspill.AdamW`: a torch.optim.Optimizer for the dense parameters and the offloaded experts."""

import copy
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError, NonFiniteError
from overspill.core.experts import ExpertId
from overspill.hardware.machine import usable_cores
from overspill.optim.gradient_norm import gradient_norm, sum_of_squares
from overspill.optim.interfaces import ExpertEngine
from overspill.optim.kernel import AdamHyper, RecordState, adamw_
from overspill.optim.parameters import check_dense, check_group, has_experts, is_placeholder
from overspill.parallel.dense import average_gradients
from overspill.parallel.ranks import Ranks
from overspill.parallel.sharded import as_sharded, is_sharded, local, part_of

EXPERTS_ELSEWHERE = "overspill_experts"
"""Key of a state dict that refers to a file with the states of the experts."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        engine = self._find_engine([p.engine for p, _ in placeholders])
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

    @staticmethod
    def _find_engine(engines: list[ExpertEngine]) -> ExpertEngine | None:
        if any(engine is not engines[0] for engine in engines):
            raise ConfigError("one AdamW supports one offloaded model; create one AdamW per model")
        return engines[0] if engines else None

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
        # the gradients are sums over the losses of all ranks
        scale = self._scale if self._ranks is None else self._scale / self._ranks.size
        return self._hyper(group, self._engine.training.steps(layer) + 1, scale)

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
            for parameter, group in dense:
                self._step_dense(parameter, group)
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

    def _step_dense(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        low = state.get("low")
        own = local(parameter)
        weight = own.contiguous()  # itself, or a copy: the kernel updates flat memory
        record = RecordState(
            weight.view(-1),
            None if low is None else low.view(-1),
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
        )
        assert parameter.grad is not None
        grad = local(parameter.grad).to(parameter.dtype).reshape(-1)
        adamw_(record, grad, self._hyper(group, state["step"], self._scale), _threads())
        if weight is not own:
            own.copy_(weight)
        # the kernel writes through a pointer: autograd must refuse graphs from before this step
        torch.autograd.graph.increment_version(parameter)

    @torch.no_grad()
    def _dense_state(self, parameter: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a dense parameter: copies of what is given, else zeros. Of a parameter that
        ranks divide it is that of a part; `given` is whole."""
        own = local(parameter)
        state: dict[str, Any] = {"step": int(given.get("step", 0))}
        dtypes = dict.fromkeys(_MOMENTS, self.state_dtype)
        if parameter.dtype == torch.bfloat16:
            dtypes["low"] = torch.int16
        for name, dtype in dtypes.items():
            if self._engine is None:
                state[name] = torch.zeros(own.shape, dtype=dtype, device=own.device)
            else:
                state[name] = self._engine.dense.new_state(own, dtype)
            if name in given:
                state[name].copy_(part_of(given[name], parameter))
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch, but experts never have gradients of zeros: theirs are dropped."""
        if self._engine is not None:
            self._engine.training.zero_grad()  # first: it may refuse
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
        """Name and dtype of each optimizer state of an expert; frozen experts have none."""
        if self._engine is None or not self._engine.training.has_states:
            return []
        return [(section.name, section.dtype) for section in self._engine.layout.sections]

    def allocate_expert_states(self) -> None:
        """Before they are loaded, also for frozen experts."""
        if self._engine is not None:
            self._engine.training.allocate_states()

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
        if any(self._layer_steps()):
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
            if not has_experts(parameter) or engine.training.steps(parameter.layer) == 0:
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
        self._check_entries(entries)
        for other in saved:
            check_group({**self.defaults, **other})
        self._restart()
        for group, other in zip(self.param_groups, saved, strict=True):
            values = {key: value for key, value in other.items() if key != "params"}
            kept = {key: group[key] for key in ("param_names", "params") if key in group}
            group.clear()
            group.update(self.defaults | kept | copy.deepcopy(values))
        self._set_dense_states(entries)
        self._load_experts(state_dict, entries)

    def _check_entries(self, entries: list[Any]) -> None:
        """Raises if an entry is not an AdamW state of its parameter, before anything changes."""
        for number, (parameter, _) in enumerate(self._parameters()):
            size = tuple(parameter.shape)
            if is_placeholder(parameter):
                size = (parameter.engine.n_experts, parameter.engine.layout.shape.numel)
            entry = entries[number]
            for name in () if entry is None else _MOMENTS:
                found = tuple(entry[name].shape) if name in entry else "none"
                if found != size or "step" not in entry:
                    raise ConfigError(
                        f"the optimizer state of parameter {number} should have a step and {name} "
                        f"of shape {size}, found {found}; load a state that overspill.AdamW saved "
                        "for this model with the same parameter groups"
                    )

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
                self._load_layer(parameter.layer, entry or {"step": 0})

    def _load_layer(self, layer: int, entry: dict[str, Any]) -> None:
        """Sets the states of a layer's experts; those that are not in `entry` become zero."""
        assert self._engine is not None
        training, records = self._engine.training, self._engine.records
        if entry["step"] == 0 and training.is_fresh(layer):
            return
        training.allocate_states()
        training.set_steps(layer, int(entry["step"]))
        for name, _ in self.expert_sections():
            stack = entry.get(name, torch.zeros(()).expand(self._engine.n_experts))
            for index in self._engine.experts.local_ids:
                records.write_state(ExpertId(layer, index), name, stack[index])

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
            flat["layer_steps"] = torch.tensor(self._steps_of_all_layers(self._engine))
        return flat

    def _steps_of_all_layers(self, engine: ExpertEngine) -> list[int]:
        """Also of layers that other ranks have; all ranks call this."""
        layers, own = (
            engine.layer_map,
            dict(zip(engine.layer_map.own, self._layer_steps(), strict=True)),
        )
        if not layers.is_whole:
            assert self._ranks is not None
            own = {layer: n for found in self._ranks.gather(own) for layer, n in found.items()}
        return [own[layer] for layer in range(layers.n_layers)]

    def load_dense_state_dict(self, flat: dict[str, Tensor]) -> None:
        """Restores the result of `dense_state_dict`."""
        self._restart()
        entries: list[dict[str, Tensor]] = [{} for _ in self._parameters()]
        for name, value in flat.items():
            if name == "layer_steps":
                assert self._engine is not None
                for layer, in_model in enumerate(self._engine.layer_map.own):
                    self._engine.training.set_steps(layer, int(value[in_model]))
                continue
            number, key = name.split(".", 1)
            entries[int(number)][key] = value
        self._set_dense_states(entries)


def _threads() -> int:
    """Threads of dense updates on the CPU; ranks of a machine share its cores."""
    return min(usable_cores(), torch.get_num_threads())


def _accelerate_accumulates() -> bool:
    """Whether accelerate, if this process uses it, is before the last micro-batch of a step.
    `step()` completes the gradients in any case."""
    state: Any = sys.modules.get("accelerate.state")
    return state is not None and not state.GradientState().sync_gradients
