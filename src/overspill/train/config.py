"""All settings of a training run: one tree of dataclasses, from flags or a file.

How fields become flags is in `settings`. This file imports no torch: `overspill train --help`
reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.train.settings import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    SHARE,
    Setting,
    check,
    make,
    read_file,
    settings_of,
)


@dataclass(frozen=True)
class ModelSection:
    """The model"""

    preset: str = "nano"
    """The preset that the other model settings change: nano, moe-s, moe-m, moe-l, moe-xl, w1."""
    experts: int | None = None
    """Experts in every MoE layer."""
    layers: int | None = None
    """Number of layers."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_hidden: int | None = None
    """Hidden width of a feed-forward block, of each expert too."""
    heads: int | None = None
    """Attention heads."""
    top_k: int | None = None
    """Experts that each token goes to."""
    moe_every: int | None = None
    """Every n-th layer is an MoE layer."""
    gated: bool | None = None
    """Gated SiLU experts (3 matrices) or GELU experts (2)."""
    vocab: int | None = None
    """Vocabulary of the model; the tokenizer's, rounded up to 64, when left out."""
    checkpoint_layers: bool = True
    """Recompute a layer's activations in backward instead of keeping them."""


@dataclass(frozen=True)
class DataSection:
    """The data and the batch"""

    data: str = "stdlib"
    """A text file (also .gz), a folder of them, or `stdlib`: the sources of Python's standard
    library on this machine."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json."""
    cache: str = "~/.cache/overspill/tokens"
    """Folder that keeps tokenized data."""
    seq_len: int | None = None
    """Tokens in a sequence; the model's context when left out."""
    batch: int = 8
    """Sequences in a micro-batch."""
    accumulate: int = 1
    """Micro-batches in a step."""
    group: bool = True
    """All micro-batches of a step pass an expert in one stay on the GPU; else one after another."""


@dataclass(frozen=True)
class OptimSection:
    """The optimizer"""

    lr: float | None = None
    """Highest learning rate; when left out 0.46 / d_model and at most 1e-3, close to what GPT-3's
    sizes were trained with."""
    warmup: int = 20
    """Steps over which the learning rate rises from zero."""
    min_lr: float = 0.1
    """Where the cosine ends, as a share of the highest learning rate."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.95
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient over all parameters; 0 switches clipping off, and every
    expert's update then starts while backward still runs."""
    state_dtype: str = "fp32"
    """Adam's moments: fp32 or bf16."""


@dataclass(frozen=True)
class MemorySection:
    """Memory and offload"""

    gpu_memory: str | None = None
    """GPU memory the run may take, such as 12GiB; all there is when left out."""
    host_memory: str | None = None
    """Host memory the run may take, such as 96GiB; 95% of what is free when left out."""
    disk: str | None = None
    """Folder on an SSD for experts that do not fit in host memory."""
    device: str | None = None
    """cuda or cpu; the GPU if there is one when left out."""
    dtype: str | None = None
    """Weights: bf16 or fp32; bf16 on a GPU and fp32 on a CPU when left out."""
    mode: str = "auto"
    """Where experts live: auto (from the budgets), gpu, host or disk."""
    slots: int | None = None
    """Experts that fit on the compute device, instead of what --gpu-memory gives."""
    host_slots: int | None = None
    """Experts kept in host memory in front of the disk, instead of what --host-memory gives."""
    pin: float = 0.25
    """Share of the slots that keeps the busiest experts of the last step; 0 switches it off."""
    overlap_updates: bool = True
    """Optimizer steps of experts run beside backward and the next forward."""
    overlap_uploads: bool = True
    """Uploads run ahead of compute."""
    waves: bool = True
    """Experts that are resident together compute together; else one by one."""
    activations: str = "recompute"
    """Activations inside experts: recompute them in backward, or keep them."""
    cpu_experts: bool = True
    """The CPU computes experts with few tokens where they lie, if by measured costs that is faster
    than uploading them to a GPU."""
    lookahead: int = 1
    """Layers ahead that a predictor names the experts needed, where the CPU has a share; 0 switches
    it off."""
    threads: int | None = None
    """Threads of the CPU optimizer and of the CPU's experts; all cores but four, at least three
    quarters, when left out."""


@dataclass(frozen=True)
class RunSection:
    """The run"""

    steps: int = 200
    """Optimizer steps of the whole run."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    out: str | None = None
    """The run's folder; runs/<preset>, or the next free number after it, when left out."""
    resume: bool = False
    """Go on from the newest checkpoint in --out (when left out: of the latest run of this
    preset)."""
    eval_every: int = 50
    """Steps between evaluations; 0 switches them off."""
    eval_batches: int = 4
    """Batches in an evaluation."""
    save_every: int = 100
    """Steps between checkpoints; 0 leaves only the last. Ctrl-C saves one too."""
    keep: int = 2
    """Checkpoints that are kept."""
    log_every: int = 10
    """Steps between lines of output and traced steps."""
    trace_steps: int = 2
    """Steps traced at each of these, for the shares in the output and the timeline; 0: none."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `overspill train` needs to know."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    memory: MemorySection = field(default_factory=MemorySection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        check(self, _RULES, _CHOICES)

    @property
    def name(self) -> str:
        """What the run's folder is called."""
        return self.model.preset

    @property
    def sequences_per_step(self) -> int:
        return self.data.batch * self.data.accumulate


def settings() -> tuple[Setting, ...]:
    return settings_of(TrainConfig)


def make_config(*layers: Mapping[str, Any]) -> TrainConfig:
    """The config from flat settings; a later layer wins over an earlier one."""
    return make(TrainConfig, layers, "train")


def read_config_file(path: Path) -> dict[str, Any]:
    """The flat settings of a .toml or .json file."""
    return read_file(TrainConfig, path)


MEMORY_RULES = {AT_LEAST_1: ["slots", "host_slots", "threads"], SHARE: ["pin"]}
MEMORY_CHOICES = {
    "mode": ("auto", "gpu", "host", "disk"),
    "dtype": ("bf16", "fp32"),
    "activations": ("recompute", "keep"),
}
_RULES = {
    AT_LEAST_1: [
        "experts", "layers", "d_model", "d_hidden", "heads", "top_k", "moe_every", "vocab",
        "seq_len", "batch", "accumulate", "steps", "keep", "log_every", "eval_batches",
        *MEMORY_RULES[AT_LEAST_1],
    ],
    NOT_NEGATIVE: [
        "warmup", "eval_every", "save_every", "trace_steps", "seed", "clip", "lr", "weight_decay",
        "eps",
    ],
    SHARE: ["min_lr", "beta1", "beta2", *MEMORY_RULES[SHARE]],
}  # fmt: skip
_CHOICES = {**MEMORY_CHOICES, "state_dtype": ("fp32", "bf16")}
