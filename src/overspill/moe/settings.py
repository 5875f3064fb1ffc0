"""The switches of the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overspill.core.errors import ConfigError
from overspill.core.experts import Phase
from overspill.transfer.new_uploader import UPLOADERS
from overspill.transfer.streams import Inject

PLACEMENTS = ("auto", "static", "dynamic")
POPULARITIES = ("history", "learned")
RECEIVED_ROWS = ("send", "keep", "auto")
CpuPolicy = Callable[[Sequence[int], Phase], frozenset[int]]
"""From the token rows of each expert to the positions of those that the CPU computes."""


@dataclass(frozen=True)
class Settings:
    """The switches of the engine. Each technique can be turned off to measure what it gains."""

    residency: bool = True
    """After the first batches, let as many experts live on the GPU as its memory allows; before a
    larger batch some leave it again. Only with mode "auto", and if neither slots nor gpu_experts
    are given."""
    follow_usage: bool = False
    """While experts are not trained, let those of each layer live on the GPU that had the most
    token rows in the last forward: they exchange places with others. Not with
    activations="keep"."""
    overlap_updates: bool = True
    """Update an expert as soon as its gradient is complete, while backward goes on."""
    overlap_uploads: bool = True
    """Upload experts ahead of their computation, across layers."""
    waves: bool = True
    """Compute experts that are on the GPU at the same time as one grouped product."""
    activations: str = "recompute"
    """Inside experts: "recompute" them in backward, or "keep" them from forward."""
    shared_balance: bool = False
    """With several ranks, balance losses of a `GPTMoE` count the tokens of all of them, so that the
    loss is that of one process with the whole batch; else each rank counts its own."""
    cpu_experts: bool = False
    """Let the CPU compute frozen experts with few tokens where they lie, if by measured costs that
    is faster than uploading them. Gains with frozen experts and some hundred tokens a batch."""
    cpu_training: bool = False
    """With `cpu_experts`, also for experts that are trained: the CPU computes their forward and
    backward, and forms the gradients of their weights in host memory."""
    cpu_policy: CpuPolicy | None = None
    """Chooses the experts of a pass that the CPU computes, instead of measured costs; for tests."""
    popularity: str = "history"
    """How the token rows of the experts of later layers are expected in forward, before their
    routing is known: as in the last passes ("history"), or by the popularity predictor, which
    learns from the routing of every pass ("learned"), in layers in which it is closer. Uploads
    ahead and the split between CPU and GPU follow it."""
    uploader: str = "auto"
    """Who issues uploads: a "native" thread, a Python "thread", or "auto" for the faster one."""
    placement: str = "auto"
    """With several ranks, who computes an expert: its owner ("static"); whichever rank balances the
    token rows of a batch ("dynamic"), which needs all experts in host memory; or "auto": "static"
    if experts may live on the GPUs, as they may by default; with mode="host", "dynamic" for batches
    in which it is faster by measured costs, on GPUs of their own."""
    exchange_groups: int | None = None
    """With several ranks, the groups of experts of a layer whose token rows travel together, while
    another group computes; at most as many as the experts of a rank. None: two for large batches on
    GPUs, else one."""
    received_rows: str = "send"
    """With several ranks, how backward gets the token rows that forward has received: other ranks
    "send" them again, they "keep" memory of the device until then, or "auto": they are kept if
    the exchange takes longest by measured speeds and they need little of the free memory."""
    max_rows: int | None = None
    """Token rows that are computed at once on the device; left out: what the budget allows."""
    threads: int | None = None
    """Threads of the CPU optimizer and of CPU experts; left out: all cores but four (they drive GPU
    and disk), at least three quarters. For experts that are missing in a decoding step: all but
    one."""
    fix_nllb_routing: bool = False
    """Route tokens of NLLB-MoE to their two experts, as it was trained. transformers uses only the
    first two experts of a layer, and so does Overspill without this (see docs/families.md)."""
    inject: Inject | None = None
    """Called before each transfer, CPU task and optimizer job; for fault-injection tests. Where the
    CPU computes, it may defer copies."""

    def __post_init__(self) -> None:
        if self.activations not in ("recompute", "keep"):
            raise ConfigError(f"activations={self.activations!r} must be 'recompute' or 'keep'")
        if self.uploader not in UPLOADERS:
            raise ConfigError(f"uploader={self.uploader!r} must be one of {', '.join(UPLOADERS)}")
        if self.popularity not in POPULARITIES:
            raise ConfigError(
                f"popularity={self.popularity!r} must be one of {', '.join(POPULARITIES)}"
            )
        if self.placement not in PLACEMENTS:
            raise ConfigError(
                f"placement={self.placement!r} must be one of {', '.join(PLACEMENTS)}"
            )
        if self.received_rows not in RECEIVED_ROWS:
            raise ConfigError(
                f"received_rows={self.received_rows!r} must be one of {', '.join(RECEIVED_ROWS)}"
            )
        if self.cpu_training and not self.cpu_experts:
            raise ConfigError(
                "cpu_training is for CPU experts, which are off; set cpu_experts=True too "
                "(--cpu-experts), or leave out cpu_training (--cpu-training)"
            )
        for name in ("threads", "max_rows", "exchange_groups"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"{name}={value!r} must be a whole number, at least 1; leave it out for the "
                    "default"
                )

    def check_model(self, model_type: str) -> None:
        """Raises if a setting is for another model."""
        if self.fix_nllb_routing and model_type != "nllb-moe":
            raise ConfigError(
                f"fix_nllb_routing is for nllb-moe, this model is {model_type}; leave it out "
                "(--fix-nllb-routing)"
            )
