"""Results of a run, as data and as text."""

import shlex
from dataclasses import dataclass
from typing import ClassVar

from overspill.core.sizes import format_size
from overspill.train.progress import resume_command


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Results of a run."""

    command: ClassVar[str] = "train"
    out: str
    steps: int
    interrupted: bool
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    seconds: float
    checkpoint: str | None
    placement: str
    """Places of the experts, in one line."""
    bytes_by_tier: dict[str, int]
    host_peak: int
    gpu_peak: int

    def lines(self) -> list[str]:
        losses = [
            f"{name} {value:.4f}"
            for name, value in (("loss", self.loss), ("eval loss", self.eval_loss))
            if value is not None
        ]
        rate = [] if self.tokens_per_s is None else [f"{self.tokens_per_s:,.0f} tok/s"]
        peaks = f"host memory peak {format_size(self.host_peak)}"
        if self.gpu_peak:
            peaks += f", GPU memory peak {format_size(self.gpu_peak)}"
        word = "stopped" if self.interrupted else "done"
        lines = [
            f"{word} at step {self.steps}: {', '.join(losses + rate)}",
            f"{self.placement}; {peaks}",
            f"run folder: {self.out}",
        ]
        if self.interrupted:
            lines.append(f"to continue: {resume_command(self.out, self.command)}")
        elif self.command == "train" and self.checkpoint is not None:
            lines.append(f"to try it: overspill chat {shlex.quote(self.out)}")
        return lines
