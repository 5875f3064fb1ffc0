"""All settings of `overspill finetune` and `pregate`. Imports no torch: --help reads this file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from overspill.core.errors import ConfigError
from overspill.core.options import Count, NotNegative, NotNegativeInt, Share
from overspill.moe.settings import RoutingFix
from overspill.train.finetune.scores import SCORES
from overspill.train.sections import (
    BatchSection,
    OptimSection,
    RunConfig,
    RunSection,
)


@dataclass(frozen=True)
class TrainedParameters:
    """The model and the parameters to train"""

    checkpoint: str = ""
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), its name on the
    hub, or the folder of a run of overspill train."""
    tokenizer: str | None = None
    """Folder of the tokenizer; default: that of the checkpoint."""
    freeze_experts: bool = False
    """Freeze the experts and train everything else."""
    freeze_dense: bool = False
    """Freeze everything but the experts."""
    lora: Count | None = None
    """Train LoRA adapters of this rank on the attention, and nothing else; needs peft."""
    lora_alpha: Count | None = None
    """LoRA's alpha; default: twice the rank."""
    lora_targets: str | None = None
    """Names of the layers that get an adapter, such as q_proj,v_proj; default: all linear layers of
    the attention."""
    lora_experts: bool = False
    """Train adapters of the experts too."""
    lora_experts_rank: Count | None = None
    """Rank of the experts' adapters, whose scale is that of the others; default: that of --lora."""
    packed: bool | None = None
    """Keep the experts of a quantized checkpoint packed in memory, or unpack them while they are
    read; default: keep them with --lora and --freeze-experts."""
    quantize: Literal["mxfp4", "int4", "fp8"] | None = None
    """Pack the experts of a checkpoint in bf16, fp16 or fp32 while they are read; for --lora and
    --freeze-experts."""
    gradient_checkpointing: bool = True
    """Recompute the activations of a layer in backward instead of keeping them."""
    balance: bool = False
    """Add the load-balancing loss of the model."""


@dataclass(frozen=True)
class FinetuneModelSection(RoutingFix, TrainedParameters):
    """The model and the parameters to train"""

    @property
    def serving_flags(self) -> tuple[str, ...]:
        """Flags with which an adapter is served on the experts that it was trained with."""
        if self.lora is None:  # the model is written with plain experts
            return ()
        if self.quantize is not None:
            return ("--quantize", self.quantize)
        return ("--no-packed",) if self.packed is False else ()


@dataclass(frozen=True)
class FinetuneDataSection(BatchSection):
    """The data and the batch"""

    data: tuple[str, ...] = ()
    """Files or folders of .jsonl, .tsv or text (also .gz), all of one kind; or "stdlib"."""
    eval_data: str | None = None
    """File or folder to evaluate on; default: a share of the data."""
    eval_split: Share = 0.05
    """Share of the data to evaluate on; 0 for none."""
    eval_examples: Count = 1000
    """Maximum number of examples that --eval-split takes, and of sequences of plain text."""
    metric: tuple[str, ...] = ()
    """Let the model answer the examples for evaluation, and score the answers: em, f1, rouge1,
    rouge2 or rougeL, or several, such as em,f1. The first one chooses the best model."""
    metric_tokens: Count = 64
    """Longest answer that is generated for --metric, in tokens."""
    chat_template: str | None = None
    """File with a chat template; default: the template of the tokenizer."""
    src_lang: str | None = None
    """Language of the prompts, as the tokenizer of a translation model names it, such as eng_Latn;
    default: the tokenizer's."""
    tgt_lang: str | None = None
    """Language of the completions, such as fra_Latn; default: the tokenizer's."""
    labels: str | None = None
    """Words for the labels 0, 1, … of a .tsv, such as negative,positive; default: the numbers."""
    label_prompt: str = "{sentence}\nLabel:"
    """Text before a label."""
    label_text: str = " {label}"
    """Text of a label."""
    seq_len: Count | None = None
    """Maximum tokens in a sequence; default: the context of the model, at most 1024."""
    truncate: bool = False
    """Cut examples that are too long instead of refusing them."""
    packing: bool | None = None
    """Put several examples into one sequence; default: on for text and chat."""

    @property
    def languages(self) -> dict[str, str]:
        """The languages that are given, by the names of their fields."""
        named = {"src_lang": self.src_lang, "tgt_lang": self.tgt_lang}
        return {name: language for name, language in named.items() if language is not None}


@dataclass(frozen=True)
class FinetuneOptimSection(OptimSection):
    """The optimizer"""

    lr: NotNegative | None = None
    """Highest learning rate; default: 1e-5, with --lora 1e-4."""
    warmup: NotNegativeInt | None = None
    """Steps over which the learning rate rises from zero; default: 3% of all steps."""


@dataclass(frozen=True)
class FinetuneRunSection(RunSection):
    """The run"""

    epochs: float = 1.0
    """Passes over the data."""
    steps: Count | None = None
    """Optimizer steps; overrides --epochs."""
    seed: NotNegativeInt = 0
    """Seed of the data order, of the evaluation split and of adapters."""
    out: str | None = None
    """Folder of the run; default: runs/finetune-<checkpoint>, with the next free number
    appended."""
    eval_every: NotNegativeInt = 100
    """Steps between evaluations; 0 evaluates only before the first step and after the last."""
    save_every: NotNegativeInt = 500


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """All settings of `overspill finetune`."""

    command: ClassVar[str] = "finetune"
    model: FinetuneModelSection = field(default_factory=FinetuneModelSection)
    data: FinetuneDataSection = field(default_factory=FinetuneDataSection)
    optim: FinetuneOptimSection = field(default_factory=FinetuneOptimSection)
    run: FinetuneRunSection = field(default_factory=FinetuneRunSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_combinations()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the scores of generated answers, each once."""
        parts = (part.strip() for given in self.data.metric for part in given.split(","))
        return tuple(dict.fromkeys(parts))

    @property
    def name(self) -> str:
        return f"{self.command}-{Path(self.model.checkpoint).expanduser().resolve().name}"

    @property
    def pregate_level(self) -> int:
        """The level of the pre-gates to train; 0 for none."""
        return 0

    @property
    def trains_experts(self) -> bool:
        return not self.model.freeze_experts and self.model.lora is None

    @property
    def expert_adapters_rank(self) -> int | None:
        """Rank of the adapters of experts; None if experts have no adapters."""
        return (
            (self.model.lora_experts_rank or self.model.lora) if self.model.lora_experts else None
        )

    def _check_combinations(self) -> None:
        """Raise a ConfigError for settings that are valid alone but not together."""
        model, data = self.model, self.data
        if self.run.epochs <= 0:
            raise ConfigError(f"--epochs {self.run.epochs:g} must be more than 0")
        if data.eval_split == 1:
            raise ConfigError("--eval-split 1 leaves nothing to train on; give a share below 1")
        self._check_metrics()
        if model.freeze_experts and model.freeze_dense and not self.pregate_level:
            raise ConfigError(
                "--freeze-experts with --freeze-dense leaves nothing to train; drop one"
            )
        if model.lora is not None and (model.freeze_experts or model.freeze_dense):
            raise ConfigError("--lora already freezes the whole model; drop --freeze-…")
        if self.memory.shard_dense and (model.lora is not None or self.pregate_level):
            what = "pre-gates" if self.pregate_level else "--lora"
            raise ConfigError(f"--shard-dense does not support {what}; drop it")
        if model.packed or model.quantize is not None:
            flag = "--packed" if model.packed else f"--quantize {model.quantize}"
            if self.trains_experts:
                raise ConfigError(
                    f"{flag}: packed experts cannot be trained; add --lora RANK or --freeze-experts"
                )
            if (self.memory.gpus or 1) > 1:
                raise ConfigError(
                    f"{flag}: several ranks are not supported yet; drop --gpus {self.memory.gpus}"
                )
        if model.packed and model.quantize is not None:
            raise ConfigError(
                "--packed is for quantized checkpoints, --quantize for others; drop one of them"
            )
        if model.lora is None and (model.lora_alpha is not None or model.lora_targets is not None):
            raise ConfigError("--lora-alpha and --lora-targets need --lora RANK, such as --lora 16")
        if model.lora_experts and model.lora is None:
            raise ConfigError("--lora-experts needs --lora RANK, such as --lora 16")
        if model.lora_experts_rank is not None and not model.lora_experts:
            raise ConfigError("--lora-experts-rank needs --lora-experts; add it")
        for flag, value, word in (
            ("--label-prompt", data.label_prompt, "{sentence}"),
            ("--label-text", data.label_text, "{label}"),
        ):
            if word not in value:
                raise ConfigError(f"{flag} {value!r} lacks {word}; put it where the text belongs")

    def _check_metrics(self) -> None:
        for name in self.metrics:
            if name not in SCORES:
                raise ConfigError(
                    f"--metric {name!r} is unknown; give one or several of {', '.join(SCORES)}"
                )
        if self.metrics and self.data.eval_data is None and self.data.eval_split == 0:
            raise ConfigError(
                "--metric needs examples for evaluation, and --eval-split 0 holds none out; give "
                "--eval-data, or another share"
            )
        if self.metrics and self.stages is not None:
            raise ConfigError(
                "--metric lets the whole model generate, which --stages divides; drop one of them"
            )


@dataclass(frozen=True)
class PregateModelSection(FinetuneModelSection):
    """The model and the parameters to train"""

    level: Count = 1
    """The gate of an MoE block is computed this many MoE blocks earlier."""
    freeze_experts: bool = False
    """Freeze the experts and train everything else; with --freeze-dense, the pre-gates alone."""
    freeze_dense: bool = False
    """Freeze everything but the experts and the pre-gates."""
    lora: Count | None = None
    """Train the pre-gates and LoRA adapters of this rank on the attention; needs peft."""


@dataclass(frozen=True)
class PregateConfig(FinetuneConfig):
    """All settings of `overspill pregate`."""

    command: ClassVar[str] = "pregate"
    model: PregateModelSection = field(default_factory=PregateModelSection)

    @property
    def pregate_level(self) -> int:
        return self.model.level
