"""Settings of both training and fine-tuning. Imports no torch: --help reads this file."""

import abc
from dataclasses import dataclass, field
from typing import Any, Literal

from overspill.core.errors import ConfigError
from overspill.core.options import Count, NotNegative, NotNegativeInt, Share
from overspill.hardware.numa import NumaBinding
from overspill.moe.settings import Switches
from overspill.plan.limits import HostSlots, MemoryLimits, PlacementOptions
from overspill.train.settings import Config


@dataclass(frozen=True)
class BatchSection:
    """The data and the batch"""

    seq_len: Count | None = None
    """Tokens in a sequence; default: the context of the model."""
    batch: Count = 8
    """Sequences in a micro-batch, on all GPUs together."""
    accumulate: Count = 1
    """Micro-batches in a step."""


@dataclass(frozen=True)
class OptimSection:
    """The optimizer"""

    lr: NotNegative | None = None
    """Highest learning rate."""
    warmup: NotNegativeInt | None = None
    """Steps over which the learning rate rises from zero."""
    min_lr: Share = 0.0
    """Final learning rate of the cosine schedule, as a share of the highest."""
    beta1: Share = 0.9
    """Decay of Adam's first moment."""
    beta2: Share = 0.999
    """Decay of Adam's second moment."""
    eps: NotNegative = 1e-8
    """Adam's epsilon."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    clip: NotNegative = 1.0
    """Maximum norm of the gradient over all parameters. 0 disables clipping; each expert is then
    updated while backward still runs."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of Adam's moments: fp32 or bf16."""


@dataclass(frozen=True)
class MemorySection(Switches, PlacementOptions, HostSlots, MemoryLimits):
    """Memory and offload"""

    gpus: Count | None = None
    """GPUs to train on, with one process for each, which divide the experts and the batch; with
    --device cpu, processes. Budgets for host memory and disk are those of all together."""
    stages: Count = 1
    """Divide the model into so many pipeline stages. All micro-batches of --accumulate pass a stage
    before the next one, so that each expert is uploaded once for all of them."""
    stage_gpus: Count | None = None
    """GPUs of --gpus that divide the stages, while the others divide the experts and the batch;
    default: as many as possible."""
    numa_binding: NumaBinding | None = None
    """Bind each rank of --gpus or torchrun to cores near its GPU: those of its NUMA node (node), of
    its socket, a part of its node that no other rank has (exclusive), or cores that share a cache
    (core-complex)."""
    shard_dense: bool = False
    """Let the ranks of --gpus or torchrun divide the dense parameters too, with FSDP2."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Data type of the weights: bf16 or fp32; default: bf16 on a GPU, fp32 on a CPU."""


@dataclass(frozen=True)
class RunSection:
    """The run"""

    steps: Count | None = None
    """Optimizer steps of the whole run."""
    seed: NotNegativeInt = 0
    """Random seed."""
    out: str | None = None
    """Folder of the run."""
    resume: bool = False
    """Continue from the newest checkpoint in --out."""
    max_restarts: NotNegativeInt = 0
    """With --gpus and --out: how often all ranks start again from the newest checkpoint after one
    has failed."""
    eval_every: NotNegativeInt = 100
    """Steps between evaluations."""
    save_every: NotNegativeInt = 100
    """Steps between checkpoints to resume from; 0 saves only the last. Ctrl-C saves one too."""
    keep: Count = 1
    """Number of checkpoints to keep."""
    log_every: Count = 10
    """Steps between log lines and between traces."""
    trace_steps: NotNegativeInt = 2
    """Steps in each trace, for the busy shares in the output and the timeline; 0 disables it."""


@dataclass(frozen=True)
class RunConfig(Config, abc.ABC):
    """Base of the configs of all runs."""

    model: Any
    data: BatchSection = field(default_factory=BatchSection)
    optim: OptimSection = field(default_factory=OptimSection)
    memory: MemorySection = field(default_factory=MemorySection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        stages, gpus = self.memory.stages, self.memory.stage_gpus
        if gpus is not None and gpus > stages:
            raise ConfigError(
                f"--stage-gpus {gpus} needs at least as many --stages, there are {stages}"
            )

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the run's folder below runs/."""

    @property
    def accumulates(self) -> bool:
        """Whether the micro-batches of a step pass the model one after another."""
        return self.data.accumulate > 1

    @property
    def trains_experts(self) -> bool:
        return True

    @property
    def stages(self) -> int | None:
        """The number of pipeline stages of the model; None if it is not divided."""
        return self.memory.stages if self.memory.stages > 1 else None

    def stage_ranks(self, node_size: int) -> int:
        """The number of a node's ranks that divide the stages; the others divide the experts."""
        stages, asked = self.memory.stages, self.memory.stage_gpus
        if asked is None:
            most = min(stages, node_size)
            return max(n for n in range(1, most + 1) if node_size % n == 0)
        if node_size % asked:
            raise ConfigError(f"--stage-gpus {asked} must divide the {node_size} GPUs of a node")
        return asked

    @property
    def sequences_per_step(self) -> int:
        return self.data.batch * self.data.accumulate
