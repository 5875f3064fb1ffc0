"""The options of `overspill.LLM`, which are also flags. Imports no torch."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from overspill.core.options import Count, DType, NotNegativeInt
from overspill.plan.limits import HostSlots, MemoryLimits

if TYPE_CHECKING:
    from overspill.moe.settings import Settings


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Decoding with experts that are not on the GPU"""

    mode: Annotated[
        str,
        ("auto", "gpu-only", "on-demand", "prefetch-all", "lookahead", "pre-gated"),
    ] = "auto"
    """auto: the CPU computes experts that are not on the GPU; gpu-only: all are there; the others
    copy what is missing: when it is needed, all of the next layer, what its router would choose
    now, or what pre-gates have chosen."""
    migrate: Annotated[str, ("auto", "cpu", "copy")] = "auto"
    """Treatment of experts that the mode names ahead: cpu: the CPU loads and computes them;
    copy: they are copied to the GPU; auto: usual for the mode, by the rates of overspill probe."""
    predictor: Annotated[str, ("gates", "learned")] | None = None
    """What names experts of the next layer in mode lookahead: copies of its gates, the default,
    or a predictor that learns from prompts and answers, and is saved at the end."""
    slots: NotNegativeInt | None = None
    """GPU slots for copies of experts, 0 for none; default: as many as fit into GPU memory."""
    cache_policy: Annotated[str, ("lfu", "lru")] = "lfu"
    """Which expert leaves a GPU slot: the one that was used least of late (lfu), or not for the
    longest time (lru)."""

    @property
    def learns(self) -> bool:
        return self.predictor == "learned"


@dataclass(frozen=True, kw_only=True)
class LLMOptions(DecodingOptions, HostSlots, MemoryLimits):
    """Model and memory"""

    dtype: DType | None = None
    """Data type of the weights: bf16 or fp32; default: that of the checkpoint."""
    adapter: str | os.PathLike[str] | None = None
    """LoRA adapter to serve with MODEL: a folder that peft has written, a repository of
    the hub, or the folder of a run of overspill finetune --lora."""
    packed: bool | None = None
    """Keep the experts of a quantized checkpoint packed in memory, or unpack them while they are
    read; default: keep them where they can stay packed."""
    quantize: Annotated[str, ("mxfp4", "int4", "fp8")] | None = None
    """Pack the experts of a checkpoint in bf16, fp16 or fp32 while they are read; see also
    overspill export --quantize."""
    context: Count = 4096
    """Tokens of a prompt with its answer at most."""
    max_batch: Count = 16
    """Answers that are computed at once at most."""
    prefill_chunk: Count | None = None
    """Tokens of prompts in a batch at most; default: as many as is fast and fits into memory."""


@dataclass(frozen=True, kw_only=True)
class LLMArguments(LLMOptions):
    """All arguments of `overspill.LLM` beside the model."""

    settings: "Settings | None" = None
    """Switches of the engine."""
