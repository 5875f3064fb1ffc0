"""How a run ended, as data and in words."""

from dataclasses import dataclass

from overspill.core.sizes import format_size
from overspill.train.progress import resume_command


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended."""

    out: str
    steps: int
    interrupted: bool
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    seconds: float
    checkpoint: str | None
    placement: str
    """What lay where, in one line."""
    bytes_by_tier: dict[str, int]
    host_peak: int
    gpu_peak: int


def summary_lines(summary: Summary, command: str = "train") -> list[str]:
    """The end of a run in words."""
    losses = [
        f"{name} {value:.4f}"
        for name, value in (("loss", summary.loss), ("eval loss", summary.eval_loss))
        if value is not None
    ]
    rate = [] if summary.tokens_per_s is None else [f"{summary.tokens_per_s:,.0f} tok/s"]
    peaks = f"host memory peak {format_size(summary.host_peak)}"
    if summary.gpu_peak:
        peaks += f", GPU memory peak {format_size(summary.gpu_peak)}"
    word = "stopped" if summary.interrupted else "done"
    lines = [
        f"{word} at step {summary.steps}: {', '.join(losses + rate)}",
        f"{summary.placement}; {peaks}",
        f"run folder: {summary.out}",
    ]
    if summary.interrupted:
        lines.append(f"to go on: {resume_command(summary.out, command)}")
    return lines
