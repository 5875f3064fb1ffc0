"""`overspill.for_trainer`: transformers' Trainer with offloaded experts.

Trainer(model=model, args=args, ..., optimizer_cls_and_kwargs=overspill.for_trainer(args))
"""

import gc
import logging
import os
import uuid
from pathlib import Path
from typing import Any, cast

import torch

from overspill.core.errors import CheckpointError, ConfigError
from overspill.moe.engine import Engine
from overspill.moe.pregate_cover import are_pregates
from overspill.optim.adamw import EXPERTS_ELSEWHERE, AdamW
from overspill.parallel.sharded import is_sharded
from overspill.tiers.safetensors_stream import StreamReader, StreamWriter
from overspill.train.checkpoint_tensors import (
    expert_state_specs,
    read_expert_states,
    write_expert_states,
)

log = logging.getLogger("overspill")

EXPERT_STATES = "overspill_optimizer.safetensors"
"""The optimizer states of the experts, next to the Trainer's optimizer.pt."""
_PREGATES = "overspill_pregates"
"""Key of a state dict with the weights of pre-gates, by the number of the parameter."""
_MOVED = "_overspill_max_grad_norm"
"""Attribute of the arguments that keeps the norm moved to the optimizer."""


def for_trainer(args: Any) -> tuple[type["TrainerAdamW"], dict[str, Any]]:
    """The `optimizer_cls_and_kwargs` of a Trainer for an offloaded model, from its
    `TrainingArguments`: learning rate, betas, eps, weight decay and clipping.

    The Trainer would clip only the dense parameters. Therefore `max_grad_norm` is moved from
    `args`, where it becomes 0, to the optimizer, which clips by the norm over all parameters,
    experts included. Weight decay applies to experts, including their biases. Without clipping, the
    `grad_norm` that the Trainer logs covers only the dense parameters: experts are updated during
    backward, and their gradient norm is not computed. When resuming, the Trainer warns about
    missing and unexpected keys, because it compares the names in the checkpoint with those of the
    parameters; an offloaded model accepts both.

    In several processes, as torchrun starts them, the model must have been offloaded with a mesh.
    The optimizer then averages the gradients, and accelerate does not wrap the model. The Trainer
    writes checkpoints in the first process alone, which lacks experts: they are refused; call
    `overspill.save(model, folder)` in all processes.
    """
    _check(args)
    return TrainerAdamW, {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,  # for groups without their own
        "max_grad_norm": _take_max_grad_norm(args),
        "n_processes": args.world_size,
        "output_dir": args.output_dir,
    }


def _check(args: Any) -> None:
    if args.fp16:
        raise ConfigError(
            "TrainingArguments(fp16=True) is not supported for an offloaded model; use bf16=True, "
            "or load the model with dtype='bfloat16'"
        )
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise ConfigError(
                f"TrainingArguments({name}=...) is not supported for an offloaded model; leave it "
                "out, Overspill places the model itself"
            )
    if args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer would use {args.n_gpu} GPUs in one process, an offloaded model uses one; "
            "start one process with CUDA_VISIBLE_DEVICES=0, or one for each GPU with torchrun"
        )
    if args.world_size > 1 and args.save_strategy != "no":
        raise ConfigError(
            f"save_strategy={args.save_strategy!r} would save in one of {args.world_size} "
            "processes, which holds a part of the experts; give save_strategy='no', and call "
            "overspill.save(model, folder) in all processes"
        )
    if args.world_size > 1 and args.bf16:
        raise ConfigError(
            "bf16=True is not supported in several processes; load the model with "
            "dtype='bfloat16' instead"
        )


def _take_max_grad_norm(args: Any) -> float | None:
    """Moves max_grad_norm out of `args`; returns it again for another Trainer."""
    if args.max_grad_norm:
        setattr(args, _MOVED, float(args.max_grad_norm))
        log.warning(
            "max_grad_norm=%s is now applied by overspill.AdamW, over dense parameters and experts "
            "together; it was set to 0 in TrainingArguments",
            args.max_grad_norm,
        )
        args.max_grad_norm = 0.0
    return getattr(args, _MOVED, None)


class TrainerAdamW(AdamW):
    """An AdamW whose state dict, in the checkpoints of a Trainer, does not contain the experts.

    The Trainer saves the model and then `optimizer.state_dict()`. The states of the experts are
    streamed to a separate file in the folder of the model; the state dict refers to it.
    """

    def __init__(
        self, params: Any, *, output_dir: str = ".", n_processes: int = 1, **kwargs: Any
    ) -> None:
        gc.collect()  # an unreferenced Trainer may still hold the previous optimizer
        super().__init__(params, **kwargs)
        size = 1 if self._ranks is None else self._ranks.size
        if size != n_processes:
            raise ConfigError(
                f"the Trainer runs in {n_processes} processes, and the experts it trains were "
                f"offloaded for {size}; give overspill.load or overspill.offload a mesh of all "
                "processes"
            )
        if any(is_sharded(parameter) for parameter, _ in self._parameters()):
            raise ConfigError("the Trainer does not support shard_dense; offload without it")
        self._output_dir = Path(output_dir).absolute()

    def state_dict(self) -> dict[str, Any]:
        """The plain state dict, and the weights of pre-gates, because the checkpoint of the model
        has the conventional gates instead. Right after the model was saved, the states of the
        experts are written next to it."""
        packed = self._without_pregates()
        parameters = [parameter for parameter, _ in self._parameters()]
        gates = {
            number: parameters[number].detach().to("cpu", copy=True)
            for number, found in enumerate(are_pregates(parameters))
            if found
        }
        return {**packed, _PREGATES: gates} if gates else packed

    def _without_pregates(self) -> dict[str, Any]:
        engine = self._expert_engine()
        folder = None if engine is None else engine.records.saved_to
        if engine is None or engine.ranks or folder is None or self.steps_taken == 0:
            return super().state_dict()
        engine.training.check_between_steps("saved")
        engine.records.mark_changed()  # once per save: the next call returns the plain state dict
        packed = torch.optim.Optimizer.state_dict(self)
        packed[EXPERTS_ELSEWHERE] = {
            "folder": str(folder),
            "id": self._write_experts(engine, folder),
            "layer_steps": [
                engine.training.optimizer.steps(layer) for layer in range(engine.n_layers)
            ],
        }
        return packed

    def _expert_engine(self) -> Engine | None:
        return cast(Engine | None, self._engine)

    def _write_experts(self, engine: Engine, folder: Path) -> str:
        """Writes the file completely or not at all; returns its unique id."""
        name = uuid.uuid4().hex
        part = folder / f"{EXPERT_STATES}.part"
        engine.flush()
        try:
            with StreamWriter(part, expert_state_specs(engine, self), {"id": name}) as writer:
                write_expert_states(writer, engine, self)
            os.replace(part, folder / EXPERT_STATES)
        finally:
            part.unlink(missing_ok=True)
        return name

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        where, engine = state_dict.get(EXPERTS_ELSEWHERE), self._expert_engine()
        if where is not None and engine is not None:
            self._check_file(engine, where)  # before anything changes
        super().load_state_dict(state_dict)
        parameters = self._parameters()
        with torch.no_grad():
            for number, value in state_dict.get(_PREGATES, {}).items():
                parameters[number][0].copy_(value)

    def _check_file(self, engine: Engine, where: dict[str, Any]) -> None:
        with StreamReader(self._find(where)) as reader:
            if reader.specs:  # some experts may have been frozen since
                self.allocate_expert_states()
            if reader.specs != expert_state_specs(engine, self):
                raise CheckpointError(
                    f"{reader.path} belongs to a model with other experts or another state_dtype; "
                    "load the model with the settings of that checkpoint"
                )

    def _load_experts(self, state_dict: dict[str, Any], entries: list[Any]) -> None:
        where, engine = state_dict.get(EXPERTS_ELSEWHERE), self._expert_engine()
        if where is None:
            super()._load_experts(state_dict, entries)
        elif engine is not None:
            engine.flush()
            with StreamReader(self._find(where)) as reader:
                read_expert_states(reader, engine, self)
            for layer, steps in enumerate(where["layer_steps"]):
                engine.training.optimizer.set_steps(layer, steps)

    def _find(self, where: dict[str, Any]) -> Path:
        """The file of expert states: where it was written, or in the output folder if the run was
        moved."""
        folder = Path(where["folder"])
        for candidate in (folder, self._output_dir / folder.name):
            file = candidate / EXPERT_STATES
            if file.is_file():
                with StreamReader(file) as reader:
                    if reader.metadata.get("id") == where["id"]:
                        return file
        raise CheckpointError(
            f"the optimizer states of the experts are not in {folder / EXPERT_STATES}, nor in "
            f"{self._output_dir / folder.name}; move the whole checkpoint folder back"
        )
