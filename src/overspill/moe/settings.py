"""The switches of the engine. Imports no torch: flags are made from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from overspill.core.errors import ConfigError
from overspill.core.experts import Phase
from overspill.core.options import Count, check_options

CpuPolicy = Callable[[Sequence[int], Phase], frozenset[int]]
"""From the token rows of each expert to the positions of those that the CPU computes."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Switches that are also flags"""

    residency: bool = True
    """After the first batches, let as many experts live on the GPU as its memory allows; before a
    larger batch some leave it again. Only with mode auto, and if the number of slots is not
    given."""
    follow_usage: bool = False
    """While experts are frozen, let those of each layer live on the GPU that had the most token
    rows in the last step. Not if activations are kept."""
    overlap_updates: bool = True
    """Update an expert as soon as its gradient is complete, during backward and the next
    forward."""
    overlap_uploads: bool = True
    """Upload experts ahead of their computation, across layers."""
    waves: bool = True
    """Compute experts that are on the GPU at the same time together, as one grouped product; else
    one by one."""
    activations: Annotated[str, ("recompute", "keep")] = "recompute"
    """Activations inside experts: recompute them in backward, or keep them from forward."""
    cpu_experts: bool = False
    """Let the CPU compute frozen experts with few tokens in host memory, if by measured costs that
    is faster than uploading them. Gains with frozen experts and some hundred tokens a batch."""
    cpu_training: bool = False
    """With CPU experts: also those that are trained; the CPU forms the gradients of their weights
    in host memory."""
    popularity: Annotated[str, ("history", "learned")] = "history"
    """Source of the token rows that experts of later layers are expected to get, for uploads ahead
    and the split between CPU and GPU: as in the last batches (history), or by a predictor that
    learns from the routing (learned), where it is closer."""
    placement: Annotated[str, ("auto", "static", "dynamic")] = "auto"
    """With several ranks, which one computes an expert: its owner (static), or any, by the routing
    of each batch (dynamic), which needs all experts in host memory; auto: static if experts may
    live on GPUs, as they may by default; with --mode host (mode="host"), dynamic for batches in
    which measured costs say that it is faster."""
    threads: Count | None = None
    """Threads of the CPU optimizer and of experts on the CPU; default: all cores but four (they
    drive GPU and disk), at least three quarters. For experts that are missing in a decoding step:
    all but one."""


@dataclass(frozen=True, kw_only=True)
class RoutingFix:
    """A flag of commands that load NLLB-MoE"""

    fix_nllb_routing: bool = False
    """Route tokens of NLLB-MoE to their two experts, as it was trained; transformers uses only the
    first two experts of a layer."""


@dataclass(frozen=True, kw_only=True)
class Settings(Switches, RoutingFix):
    """The switches of the engine. Each technique can be turned off to measure its gain."""

    shared_balance: bool = False
    """With several ranks, balance losses of a `GPTMoE` count the tokens of all of them, so that the
    loss is that of one process with the whole batch; else each rank counts its own."""
    uploader: Annotated[str, ("auto", "thread", "native")] = "auto"
    """Who issues uploads: a "native" thread, a Python "thread", or "auto" for the faster one."""
    exchange_groups: Count | None = None
    """With several ranks, the groups of experts of a layer whose token rows travel together, while
    another group computes; at most as many as the experts of a rank. None: two for large batches on
    GPUs, else one."""
    received_rows: Annotated[str, ("send", "keep", "auto")] = "send"
    """With several ranks, how backward gets the token rows that forward has received: other ranks
    "send" them again, they "keep" memory of the device until then, or "auto": they are kept if
    the exchange takes longest by measured speeds and they need little of the free memory."""
    prompt_replicas: bool = False
    """In serving, let prompts copy experts that decoding keeps on the GPU from there, instead of
    uploading them again."""
    max_rows: Count | None = None
    """Token rows that are computed at once on the device; left out: as many as the budget
    allows."""
    cpu_policy: CpuPolicy | None = None
    """Chooses the experts of a pass that the CPU computes, instead of measured costs; for tests."""
    inject: Callable[[str], Any] | None = None
    """Called before each transfer, CPU task and optimizer job; for fault-injection tests. Where the
    CPU computes, it may defer copies."""

    def __post_init__(self) -> None:
        check_options(self, Settings)
        if self.cpu_experts and self.activations == "keep":
            raise ConfigError(
                'activations="keep" is not supported with cpu_experts: the CPU keeps none; leave '
                "out activations (--activations), or cpu_experts (--cpu-experts)"
            )
        if self.cpu_experts and self.exchange_groups not in (None, 1):
            raise ConfigError(
                f"exchange_groups={self.exchange_groups} is not supported with cpu_experts: the "
                "CPU gets its token rows at once; leave out exchange_groups, or cpu_experts"
            )
        if self.cpu_experts and self.placement == "dynamic":
            raise ConfigError(
                'placement="dynamic" is not supported with cpu_experts: the CPU computes experts '
                'in the memory of its own rank; give "static" or "auto", or turn cpu_experts off'
            )
        if self.cpu_training and not self.cpu_experts:
            raise ConfigError(
                "cpu_training is for CPU experts, which are off; set cpu_experts=True too "
                "(--cpu-experts), or leave out cpu_training (--cpu-training)"
            )

    def check_model(self, model_type: str) -> None:
        """Raise if a setting is for another model."""
        if self.fix_nllb_routing and model_type != "nllb-moe":
            raise ConfigError(
                f"fix_nllb_routing is for nllb-moe, this model is {model_type}; leave it out "
                "(--fix-nllb-routing)"
            )
