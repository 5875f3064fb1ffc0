"""Specification of a run: settings, team, and numbers that follow from them."""

import abc
import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from overspill.core.errors import ConfigError
from overspill.core.options import values_of
from overspill.models.budgets import Budgets
from overspill.moe.settings import Settings, Switches
from overspill.plan.limits import MemoryLimits, PlacementOptions
from overspill.train.checkpoint import Fact
from overspill.train.sections import RunConfig
from overspill.train.team import Team

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters of a model."""

    dense: int
    experts: int
    """Parameters of all experts."""
    used: float
    """Share of the experts that a token uses."""

    @property
    def active(self) -> int:
        return self.dense + round(self.experts * self.used)


@dataclass(frozen=True)
class RunSpec(abc.ABC):
    """Specification of a run, decided and checked before any memory is allocated."""

    config: RunConfig
    device: torch.device
    slots: int | None
    seq_len: int
    steps: int
    lr: float
    warmup: int
    eval_every: int
    data_digest: str
    """Digest of the data."""
    model_facts: dict[str, Fact]
    """Facts that determine the tensors of the model."""
    team: Team

    @property
    def dtype(self) -> torch.dtype:
        default = "bf16" if self.device.type == "cuda" else "fp32"
        return DTYPES[self.config.memory.dtype or default]

    @property
    def facts(self) -> dict[str, Fact]:
        """Facts that must be equal to resume from a checkpoint: tensors, and the order of the
        data."""
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
        switches = values_of(memory, Switches) | {"threads": memory.threads or self.team.threads}
        return Budgets(
            **given[MemoryLimits] | {"device": self.device},
            **given[PlacementOptions] | {"slots": self.slots},
            host_slots=memory.host_slots,
            settings=Settings(**switches, shared_balance=True),
            state_dtype=DTYPES[optim.state_dtype],
            keep_gradients=self.config.trains_experts and waits,
            mesh=self.team.mesh,
            shard_dense=memory.shard_dense,
            stages=self.config.stages,
            quiet=True,
        )

    def with_activations(self, budgets: Budgets, hidden_size: int, n_blocks: int) -> Budgets:
        """The budgets with host memory reserved for hidden states: in stages on a GPU, those before
        each block wait there."""
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
        """The numbers of parameters of the model."""

    @abc.abstractmethod
    def load_model(self) -> Any:
        """The offloaded model, within `budgets`."""

    def prepare(self, model: Any) -> nn.Module:
        """The model, with frozen parameters and adapters as the config says."""
        return cast(nn.Module, model)


def check_stages(count: int, n_blocks: int, model: str) -> None:
    """Raise if the model cannot be divided into `count` stages."""
    if count > n_blocks:
        raise ConfigError(
            f"--stages {count}: a stage needs a block, and {model} has {n_blocks} blocks; give 1 "
            f"to {n_blocks}"
        )
