"""The switches of the engine."""

from dataclasses import dataclass

from overspill.core.errors import ConfigError
from overspill.transfer.lanes import Inject


@dataclass(frozen=True)
class Settings:
    """The switches of the engine; each technique can be turned off to see what it is worth."""

    pin_share: float = 0.25
    """Share of the slots that keep the busiest experts of the last step; 0 turns pinning off."""
    overlap_updates: bool = True
    """Update an expert as soon as its gradient is complete, while backward goes on."""
    overlap_uploads: bool = True
    """Upload experts ahead of their computation, across layers."""
    waves: bool = True
    """Compute experts that are resident together as one grouped product."""
    activations: str = "recompute"
    """Inside experts: "recompute" them in backward, or "keep" them from forward."""
    cpu_experts: bool = True
    """Let the CPU compute experts with few tokens where they lie, if by measured costs that is
    faster than uploading them to a GPU."""
    lookahead: int = 1
    """How many layers ahead a predictor names the experts that will be needed, where the CPU takes
    a share; 0 goes by the last passes alone."""
    threads: int | None = None
    """Threads of the CPU optimizer and of the CPU's experts; left out: all cores but four (they
    drive GPU and disk), at least three quarters."""
    inject: Inject | None = None
    """Called before each transfer and optimizer job; for tests."""

    @property
    def may_share(self) -> bool:
        """What is kept of a forward lies in the order of its rows, and another split has others."""
        return self.cpu_experts and self.activations != "keep"

    def __post_init__(self) -> None:
        if not 0 <= self.pin_share < 1:
            raise ConfigError(f"pin_share={self.pin_share} must be at least 0 and below 1")
        if self.activations not in ("recompute", "keep"):
            raise ConfigError(f"activations={self.activations!r} must be 'recompute' or 'keep'")
        if self.lookahead < 0:
            raise ConfigError(f"lookahead={self.lookahead} must be 0 (off) or a number of layers")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(
                f"threads={self.threads} must be at least 1; leave it out for all but a few"
            )
