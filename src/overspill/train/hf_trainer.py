"""`overspill.for_trainer`: transformers' Trainer with experts that are offloaded.

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
from overspill.optim.adamw import AdamW
from overspill.tiers.safetensors_stream import StreamReader, StreamWriter
from overspill.train.checkpoint import (
    expert_state_specs,
    read_expert_states,
    write_expert_states,
)

log = logging.getLogger("overspill")

EXPERT_STATES = "overspill_optimizer.safetensors"
"""Beside the Trainer's optimizer.pt: the states of the experts, streamed."""
_EXPERTS = "overspill_experts"
_MOVED = "_overspill_max_grad_norm"
"""Where the arguments keep the norm that they gave away."""


def for_trainer(args: Any) -> tuple[type["TrainerAdamW"], dict[str, Any]]:
    """What `Trainer(optimizer_cls_and_kwargs=...)` needs to train an offloaded model, from its
    `TrainingArguments`: learning rate, betas, eps, weight decay and clipping.

    The Trainer itself would clip the dense parameters alone; so `max_grad_norm` moves from `args`,
    where it becomes 0, into the optimizer, which clips by the norm over all parameters, experts
    included. Experts decay as weights do, and their biases with them. Without clipping the
    `grad_norm` that the Trainer logs is of the dense part only: experts are then updated during
    backward, and nobody adds their gradients up. On resuming, the Trainer warns of missing and
    unexpected keys: it compares names in the checkpoint with names in the model, and does not know
    that an offloaded model takes both.
    """
    _check(args)
    return TrainerAdamW, {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,  # of groups for which the Trainer says nothing else
        "max_grad_norm": _take_max_grad_norm(args),
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
                "out, Overspill itself decides what lies where"
            )
    if args.world_size > 1 or args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer would use {max(args.world_size, args.n_gpu)} GPUs, an offloaded model "
            "has one; start one process, with CUDA_VISIBLE_DEVICES=0"
        )


def _take_max_grad_norm(args: Any) -> float | None:
    """Also of arguments that gave it away before, for another Trainer."""
    if args.max_grad_norm:
        setattr(args, _MOVED, float(args.max_grad_norm))
        log.warning(
            "max_grad_norm=%s is applied by overspill.AdamW, over dense parameters and experts "
            "together; in TrainingArguments it is 0 from now on",
            args.max_grad_norm,
        )
        args.max_grad_norm = 0.0
    return getattr(args, _MOVED, None)


class TrainerAdamW(AdamW):
    """The AdamW for a Trainer, whose checkpoints do not hold the experts' states in memory.

    The Trainer saves the model and right after it `optimizer.state_dict()`. The states of experts
    go to a file of their own in the folder that the model was saved to; the state dict tells where.
    """

    def __init__(self, params: Any, *, output_dir: str = ".", **kwargs: Any) -> None:
        gc.collect()  # a Trainer that is gone may still hold the optimizer before this one
        super().__init__(params, **kwargs)
        self._output_dir = Path(output_dir).absolute()

    def state_dict(self) -> dict[str, Any]:
        """As the plain one, but for a model that was just saved: then the experts' states are
        written beside it."""
        engine = self._expert_engine()
        folder = None if engine is None else engine.saved_to
        if engine is None or folder is None or self.steps_taken == 0:
            return super().state_dict()
        engine.saved_to = None  # once: the state dict given first knows the file written first
        packed = torch.optim.Optimizer.state_dict(self)
        packed[_EXPERTS] = {
            "folder": str(folder),
            "id": self._write_experts(engine, folder),
            "layer_steps": list(engine.layer_steps),
        }
        return packed

    def _expert_engine(self) -> Engine | None:
        return cast(Engine | None, self._engine)

    def _write_experts(self, engine: Engine, folder: Path) -> str:
        """Complete or not there; returns a name that tells this file from all others."""
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
        where = state_dict.get(_EXPERTS)
        engine = self._expert_engine()
        if where is None or engine is None:
            super().load_state_dict(state_dict)
            return
        with StreamReader(self._find(where)) as reader:
            if reader.specs != expert_state_specs(engine, self):
                raise CheckpointError(
                    f"{reader.path} is of a model with other experts, or of another state_dtype; "
                    "load the model as it was when this was written"
                )
            super().load_state_dict(state_dict)
            engine.flush()
            read_expert_states(reader, engine, self)
        engine.layer_steps[:] = where["layer_steps"]

    def _find(self, where: dict[str, Any]) -> Path:
        """Where it was written; or in the output folder of now, if that was moved as a whole."""
        folder = Path(where["folder"])
        for candidate in (folder, self._output_dir / folder.name):
            file = candidate / EXPERT_STATES
            if file.is_file():
                with StreamReader(file) as reader:
                    if reader.metadata.get("id") == where["id"]:
                        return file
        raise CheckpointError(
            f"the optimizer states of the experts are not in {folder / EXPERT_STATES}, where the "
            f"checkpoint says, nor in {self._output_dir / folder.name}; put the whole checkpoint "
            "folder back to one of these places"
        )
