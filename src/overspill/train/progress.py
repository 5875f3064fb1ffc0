"""The output of a run: a progress bar on a terminal, plain lines elsewhere."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from overspill.core.sizes import format_size
from overspill.train.metrics import EvalMetrics, StepMetrics


class Display:
    """Prints one line per logged step, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0

    def say(self, line: str) -> None:
        # soft_wrap: no line breaks, for grep. No markup: paths may contain brackets.
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def begin(self, steps: int, done: int) -> None:
        """Called before the first step; `done` steps were taken before a resume."""
        self._steps = steps

    def step(self, metrics: StepMetrics, log: bool) -> None:
        """Called after each step; with `log` its metrics are printed."""
        if log:
            parts = [headline(metrics), *details(metrics)]
            self.say(f"step {metrics.step}/{self._steps}  " + "  |  ".join(parts))

    def evaluation(self, metrics: EvalMetrics) -> None:
        self.say(f"step {metrics.step}/{self._steps}  eval loss {evaluation_line(metrics)}")

    def end(self) -> None:
        """Called after the last step."""


class LiveDisplay(Display):
    """A progress bar with the latest metrics; below it memory use and busy shares."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.fields[headline]}"),
            console=console,
        )
        self._details = Text()
        self._eval = ""
        self._live = Live(Group(self._progress, self._details), console=console)
        self._task = self._progress.add_task("", total=1, headline="")

    def begin(self, steps: int, done: int) -> None:
        super().begin(steps, done)
        self._progress.update(self._task, total=steps, completed=done)
        self._live.start()

    def step(self, metrics: StepMetrics, log: bool) -> None:
        text = headline(metrics) + self._eval
        self._progress.update(self._task, completed=metrics.step, headline=text)
        if log:
            self._details.plain = "  |  ".join(details(metrics))

    def evaluation(self, metrics: EvalMetrics) -> None:
        self._eval = f"  eval {evaluation_line(metrics)}"

    def end(self) -> None:
        self._live.stop()


def make_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else Display(console)


@contextmanager
def showing(display: Display, steps: int, done: int) -> Iterator[None]:
    """Ends the display also after an error, whose message a live bar would hide."""
    display.begin(steps, done)
    try:
        yield
    finally:
        display.end()


def headline(metrics: StepMetrics) -> str:
    return f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tok/s"


def evaluation_line(metrics: EvalMetrics) -> str:
    accuracy = "" if metrics.accuracy is None else f"  accuracy {metrics.accuracy:.1%}"
    return f"{metrics.eval_loss:.4f}{accuracy}"


def details(metrics: StepMetrics) -> list[str]:
    """Memory use and busy shares, if this step measured them."""
    parts = []
    if metrics.bytes_by_tier is not None:
        sizes = {tier: format_size(size) for tier, size in metrics.bytes_by_tier.items()}
        if metrics.gpu_use is not None:
            sizes["gpu"] = _use_line(metrics.gpu_use)
        parts.append("  ".join(f"{tier} {size}" for tier, size in sizes.items()))
    if metrics.rank_rows is not None:
        rows = " ".join(f"{count:,}" for count in metrics.rank_rows)
        parts.append(
            f"token rows of ranks {rows} (most over mean {metrics.rank_balance:.2f}, static "
            f"{metrics.rank_balance_static:.2f})"
        )
    if metrics.busy is not None:
        parts.append("busy: " + busy_line(metrics.busy))
    return parts


def _use_line(use: dict[str, int]) -> str:
    size = {name: format_size(count) for name, count in use.items()}
    what = ", ".join(f"{name} {size[name]}" for name in ("experts", "slots", "rest"))
    return f"{size['reserved']} of {size['budget']} ({what})"


def busy_line(busy: dict[str, float]) -> str:
    """The trace lanes, grouped by device."""
    ssd = max(busy.get("ssd read", 0.0), busy.get("ssd write", 0.0))
    shares = {
        "GPU": busy.get("gpu compute", 0.0),
        "PCIe up": busy.get("upload", 0.0),
        "PCIe down": busy.get("download", 0.0),
        "CPU optimizer": busy.get("optimizer", 0.0),
        "SSD": ssd,
    }
    return "  ".join(f"{name} {share:.0%}" for name, share in shares.items())


def resume_command(out: str | os.PathLike[str], command: str = "train") -> str:
    return f"overspill {command} --resume --out {shlex.quote(os.fspath(out))}"
