"""The model, engine and optimizer of a run: what they are built from, built and resumed."""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from overspill.core.errors import ConfigError
from overspill.core.options import values_of
from overspill.models.budgets import Budgets
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings, Switches
from overspill.optim.adamw import AdamW
from overspill.plan.limits import MemoryLimits, PlacementOptions
from overspill.train import checkpoint
from overspill.train.checkpoint import Fact, TrainState
from overspill.train.progress import Display
from overspill.train.run_folder import RunFolder
from overspill.train.run_warnings import ModelSize, warnings_before
from overspill.train.sections import RunConfig
from overspill.train.team import Team

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Session:
    """What a run trains."""

    model: nn.Module
    engine: Engine
    optimizer: AdamW


@dataclass(frozen=True)
class RunSpec(abc.ABC):
    """Everything a run is built from, decided and checked before any memory is allocated."""

    config: RunConfig
    device: torch.device
    slots: int | None
    seq_len: int
    steps: int
    lr: float
    warmup: int
    eval_every: int
    data_digest: str
    """Changes with the data."""
    model_facts: dict[str, Fact]
    """What determines the tensors of the model."""
    team: Team

    @property
    def dtype(self) -> torch.dtype:
        default = "bf16" if self.device.type == "cuda" else "fp32"
        return DTYPES[self.config.memory.dtype or default]

    @property
    def facts(self) -> dict[str, Fact]:
        """What must be equal to resume from a checkpoint: tensors, and the order of the data."""
        return {
            **self.model_facts,
            "dtype": str(self.dtype).removeprefix("torch."),
            "state_dtype": self.config.optim.state_dtype,
            "seq_len": self.seq_len,
            "seed": self.config.run.seed,
        }

    @property
    def budgets(self) -> Budgets:
        memory, optim = self.config.memory, self.config.optim
        waits = optim.clip > 0 or self.config.accumulates or not memory.overlap_updates
        waits = waits or self.team.has_nodes
        given = {kind: values_of(memory, kind) for kind in (MemoryLimits, PlacementOptions)}
        return Budgets(
            **given[MemoryLimits] | {"device": self.device},
            **given[PlacementOptions] | {"slots": self.slots},
            host_slots=memory.host_slots,
            settings=Settings(**values_of(memory, Switches), shared_balance=True),
            state_dtype=DTYPES[optim.state_dtype],
            keep_gradients=self.config.trains_experts and waits,
            mesh=self.team.mesh,
            shard_dense=memory.shard_dense,
            stages=self.config.stages,
            quiet=True,
        )

    def with_activations(self, budgets: Budgets, hidden_size: int, n_blocks: int) -> Budgets:
        """In stages on a GPU, hidden states before each block wait in host memory."""
        if self.config.stages is None or self.device.type != "cuda":
            return budgets
        data = self.config.data
        tokens = -(-data.batch // self.team.parts) * self.seq_len
        hidden = tokens * hidden_size * self.dtype.itemsize
        own = -(-n_blocks // self.team.n_stages) * data.accumulate
        # torch's allocator of pinned memory gives out powers of two
        return dataclasses.replace(budgets, host_reserved=own * (1 << (hidden - 1).bit_length()))

    @abc.abstractmethod
    def model_size(self) -> ModelSize:
        """How many parameters the model has."""

    @abc.abstractmethod
    def load_model(self) -> Any:
        """The offloaded model, within `budgets`."""

    def prepare(self, model: Any) -> nn.Module:
        """The model with what the config freezes or adds."""
        return cast(nn.Module, model)


def check_stages(count: int, n_blocks: int, model: str) -> None:
    """Raises if the model cannot be divided into so many stages."""
    if count > n_blocks:
        raise ConfigError(
            f"--stages {count}: a stage needs a block, and {model} has {n_blocks} blocks; give 1 "
            f"to {n_blocks}"
        )


Builder = Callable[[RunSpec], Session]


def build_session(spec: RunSpec) -> Session:
    """Allocates the memory and builds model and optimizer."""
    optim = spec.config.optim
    model = spec.load_model()
    engine = cast(Engine, model.overspill)
    try:
        model = spec.prepare(model)
        optimizer = AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=spec.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            max_grad_norm=optim.clip or None,
            state_dtype=DTYPES[optim.state_dtype],
            ranks=engine.ranks,
        )
    except BaseException:
        engine.close()
        raise
    return Session(model=model, engine=engine, optimizer=optimizer)


@contextmanager
def open_session(
    spec: RunSpec, folder: RunFolder, display: Display, build: Builder
) -> Iterator[tuple[Session, TrainState]]:
    """The session of a run and the state it starts from, while no other run uses `folder`."""
    first = spec.team.is_first
    with folder if first else nullcontext():
        if first and not spec.config.run.resume:
            folder.check_free()  # again: another process may have used it until now
        start = _find_start(folder, spec, display) if spec.config.run.resume else None
        if first:
            for line in warnings_before(spec):
                display.say(line)
        session = build(spec)
        try:
            spec.team.follow(session.engine)
            display.say(session.engine.describe())
            # Only now: a run that could not be built leaves no files.
            if first:
                folder.write_config(spec.config)
            state = TrainState(0, 0, spec.data_digest, spec.facts)
            if start is not None:
                state = checkpoint.load(start, session.model, session.engine, session.optimizer)
            yield session, state
        finally:
            # Also after an error or a second Ctrl-C: stops the threads of the engine.
            session.engine.close()


def _find_start(folder: RunFolder, spec: RunSpec, display: Display) -> Path | None:
    """The checkpoint to resume from; that it fits is checked before any memory is allocated."""
    if spec.team.is_first:
        checkpoint.clean(folder.checkpoints)
    start = checkpoint.newest(folder.checkpoints)
    spec.team.check_same({"the checkpoint, in a --out folder that all nodes share,": str(start)})
    if start is None:
        display.say(f"{folder.path} has no checkpoint yet: starting at step 0")
        return None
    checkpoint.check_fits(start, spec.facts)
    if checkpoint.read_state(start).data_digest != spec.data_digest:
        display.say("the data has changed since this run began: the losses will differ")
    display.say(f"resuming from {start}")
    return start
