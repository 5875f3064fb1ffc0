"""All settings of `overspill train`. Imports no torch: its --help reads this file."""

from dataclasses import dataclass, field
from typing import ClassVar

from overspill.core.options import Count, NotNegative, NotNegativeInt, Share
from overspill.train.sections import (
    BatchSection,
    MemorySection,
    OptimSection,
    RunConfig,
    RunSection,
)

__all__ = ["MemorySection", "TrainConfig"]


@dataclass(frozen=True)
class TrainModelSection:
    """The model"""

    preset: str = "nano"
    """The preset that the other model settings change: nano, moe-s, moe-m, moe-l, moe-xl, w1, or
    another GPT-MoE of `overspill create --list`."""
    experts: Count | None = None
    """Experts in every MoE layer."""
    layers: Count | None = None
    """Number of layers."""
    d_model: Count | None = None
    """Width of the residual stream."""
    d_hidden: Count | None = None
    """Hidden width of a feed-forward block and of each expert."""
    heads: Count | None = None
    """Attention heads."""
    top_k: Count | None = None
    """Experts per token."""
    moe_every: Count | None = None
    """Every n-th layer is an MoE layer."""
    gated: bool | None = None
    """Gated SiLU experts (3 matrices) or GELU experts (2)."""
    vocab: Count | None = None
    """Vocabulary size of the model; default: that of the tokenizer, rounded up to a multiple of
    64."""
    checkpoint_layers: bool = True
    """Recompute the activations of a layer in backward instead of keeping them."""


@dataclass(frozen=True)
class TrainDataSection(BatchSection):
    """The data and the batch"""

    data: str = "stdlib"
    """A text file (also .gz), a folder of them, or `stdlib`: the sources of Python's standard
    library on this machine."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json."""
    cache: str = "~/.cache/overspill/tokens"
    """Folder for tokenized data."""
    group: bool = True
    """Run all micro-batches of a step through an expert during one stay on the GPU; else one
    micro-batch after another, as always with --stages."""


@dataclass(frozen=True)
class TrainOptimSection(OptimSection):
    """The optimizer"""

    lr: NotNegative | None = None
    """Highest learning rate; default: 0.46 / d_model, at most 1e-3, close to that of the GPT-3
    models."""
    warmup: NotNegativeInt = 20
    min_lr: Share = 0.1
    beta2: Share = 0.95
    weight_decay: NotNegative = 0.1


@dataclass(frozen=True)
class TrainRunSection(RunSection):
    """The run"""

    steps: Count = 200
    seed: NotNegativeInt = 0
    """Seed of the weights and of the data order."""
    out: str | None = None
    """Folder of the run; default: runs/<preset>, with the next free number appended."""
    resume: bool = False
    """Continue from the newest checkpoint in --out; default: of the latest run of this preset."""
    eval_every: NotNegativeInt = 50
    """Steps between evaluations; 0 disables them."""
    eval_batches: Count = 4
    """Batches in an evaluation."""
    keep: Count = 2


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """All settings of `overspill train`."""

    command: ClassVar[str] = "train"
    model: TrainModelSection = field(default_factory=TrainModelSection)
    data: TrainDataSection = field(default_factory=TrainDataSection)
    optim: TrainOptimSection = field(default_factory=TrainOptimSection)
    run: TrainRunSection = field(default_factory=TrainRunSection)

    @property
    def name(self) -> str:
        return self.model.preset

    @property
    def accumulates(self) -> bool:
        return super().accumulates and (not self.data.group or self.stages is not None)
