"""All settings of `overspill finetune`. This file imports no torch: its --help reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.core.errors import ConfigError
from overspill.train.config import MEMORY_CHOICES, MEMORY_RULES, MemorySection
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
    """The model and what of it is trained"""

    checkpoint: str = ""
    """The folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or its name on
    the hub."""
    tokenizer: str | None = None
    """Folder of the tokenizer, when it is not the checkpoint's."""
    freeze_experts: bool = False
    """Leave the experts as they are and train everything else."""
    freeze_dense: bool = False
    """Leave everything but the experts as it is."""
    lora: int | None = None
    """Train LoRA adapters of this rank on the dense part, and nothing else; needs peft."""
    lora_alpha: int | None = None
    """LoRA's alpha; twice the rank when left out."""
    lora_targets: str | None = None
    """Names of the layers that get an adapter, such as q_proj,v_proj; all linear layers of the
    attention when left out."""
    gradient_checkpointing: bool = True
    """Recompute a layer's activations in backward instead of keeping them."""
    balance: bool = False
    """Add the model's own loss that balances its routers."""


@dataclass(frozen=True)
class DataSection:
    """The data and the batch"""

    data: tuple[str, ...] = ()
    """Files or folders of .jsonl or .tsv (also .gz), all of one kind."""
    eval_data: str | None = None
    """A file or folder to evaluate on; a share of the data when left out."""
    eval_split: float = 0.05
    """Share of the data that is kept for evaluation; 0: none."""
    eval_examples: int = 1000
    """Most examples that --eval-split takes."""
    chat_template: str | None = None
    """A file with the chat template, when the tokenizer has none or another is wanted."""
    labels: str | None = None
    """The words of the labels 0, 1, … of a .tsv, such as negative,positive; the numbers themselves
    when left out."""
    label_prompt: str = "{sentence}\nLabel:"
    """What comes before a label."""
    label_text: str = " {label}"
    """How a label is written after it."""
    seq_len: int | None = None
    """Most tokens in a sequence; the model's context, and at most 1024, when left out."""
    truncate: bool = False
    """Cut examples that are longer, instead of refusing them."""
    packing: bool | None = None
    """Put several examples into one sequence; on for text and chat when left out."""
    batch: int = 8
    """Sequences in a micro-batch."""
    accumulate: int = 1
    """Micro-batches in a step."""


@dataclass(frozen=True)
class OptimSection:
    """The optimizer"""

    lr: float | None = None
    """Highest learning rate; 1e-5 when left out, 1e-4 with --lora."""
    warmup: int | None = None
    """Steps over which the learning rate rises from zero; 3% of all when left out."""
    min_lr: float = 0.0
    """Where the cosine ends, as a share of the highest learning rate."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.999
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient over all parameters; 0 switches clipping off, and every
    expert's update then starts while backward still runs."""
    state_dtype: str = "fp32"
    """Adam's moments: fp32 or bf16."""


@dataclass(frozen=True)
class RunSection:
    """The run"""

    epochs: float = 1.0
    """Passes over the data."""
    steps: int | None = None
    """Optimizer steps, instead of --epochs."""
    seed: int = 0
    """Seed of the order of the data, of the split and of adapters."""
    out: str | None = None
    """The run's folder; runs/finetune-<checkpoint>, or the next free number after it, when left
    out."""
    resume: bool = False
    """Go on from the newest checkpoint in --out."""
    eval_every: int = 100
    """Steps between evaluations; 0 leaves those before the first step and after the last."""
    save_every: int = 500
    """Steps between checkpoints to resume from; 0 leaves only the last. Ctrl-C saves one too."""
    keep: int = 1
    """Checkpoints to resume from that are kept."""
    log_every: int = 10
    """Steps between lines of output and traced steps."""
    trace_steps: int = 2
    """Steps traced at each of these, for the shares in the output and the timeline; 0: none."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything that `overspill finetune` needs to know."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    memory: MemorySection = field(default_factory=MemorySection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        check(self, _RULES, _CHOICES)
        _check_together(self)

    @property
    def name(self) -> str:
        """What the run's folder is called."""
        return f"finetune-{Path(self.model.checkpoint).expanduser().resolve().name}"

    @property
    def sequences_per_step(self) -> int:
        return self.data.batch * self.data.accumulate

    @property
    def trains_experts(self) -> bool:
        return not self.model.freeze_experts and self.model.lora is None


def settings() -> tuple[Setting, ...]:
    return settings_of(FinetuneConfig)


def make_config(*layers: Mapping[str, Any]) -> FinetuneConfig:
    """The config from flat settings; a later layer wins over an earlier one."""
    return make(FinetuneConfig, layers, "finetune")


def read_config_file(path: Path) -> dict[str, Any]:
    """The flat settings of a .toml or .json file."""
    return read_file(FinetuneConfig, path)


_RULES = {
    AT_LEAST_1: [
        "seq_len", "batch", "accumulate", "steps", "keep", "log_every", "lora", "lora_alpha",
        "eval_examples",
        *MEMORY_RULES[AT_LEAST_1],
    ],
    NOT_NEGATIVE: [
        "warmup", "eval_every", "save_every", "trace_steps", "seed", "clip", "lr", "weight_decay",
        "eps",
    ],
    SHARE: ["min_lr", "beta1", "beta2", "eval_split", *MEMORY_RULES[SHARE]],
}  # fmt: skip
_CHOICES = {**MEMORY_CHOICES, "state_dtype": ("fp32", "bf16")}


def _check_together(config: FinetuneConfig) -> None:
    """Settings that are right alone and wrong together."""
    model, data = config.model, config.data
    if config.run.epochs <= 0:
        raise ConfigError(f"--epochs {config.run.epochs:g} must be more than 0")
    if data.eval_split == 1:
        raise ConfigError("--eval-split 1 leaves nothing to train on; give a share below 1")
    if model.freeze_experts and model.freeze_dense:
        raise ConfigError("--freeze-experts with --freeze-dense leaves nothing to train; drop one")
    if model.lora is not None and (model.freeze_experts or model.freeze_dense):
        raise ConfigError("--lora freezes the whole model itself; leave --freeze-… out")
    if model.lora is None and (model.lora_alpha is not None or model.lora_targets is not None):
        raise ConfigError("--lora-alpha and --lora-targets need --lora RANK; give it, such as 16")
    for flag, value, word in (
        ("--label-prompt", data.label_prompt, "{sentence}"),
        ("--label-text", data.label_text, "{label}"),
    ):
        if word not in value:
            raise ConfigError(f"{flag} {value!r} has no {word}; put it where that goes")
