"""What a run shows while it runs: a live bar on a terminal, plain lines elsewhere."""

import os
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from overspill.core.sizes import format_size
from overspill.train.metrics import EvalMetrics, StepMetrics


class Display(Protocol):
    """Shows a run to whoever started it."""

    def say(self, line: str) -> None:
        """A line that stays."""

    def begin(self, steps: int, done: int) -> None:
        """The steps begin; `done` of them are in the checkpoint already."""

    def step(self, metrics: StepMetrics, log: bool) -> None:
        """A step is done; `log`: its line should stay."""

    def evaluation(self, metrics: EvalMetrics) -> None: ...

    def end(self) -> None:
        """No step follows."""


def make_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class PlainDisplay:
    """One line per logged step: for files, pipes and continuous integration."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0

    def say(self, line: str) -> None:
        # soft_wrap: a line stays one line for whoever greps it. No markup: paths may hold [ and ].
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def begin(self, steps: int, done: int) -> None:
        self._steps = steps

    def step(self, metrics: StepMetrics, log: bool) -> None:
        if log:
            parts = [headline(metrics), *details(metrics)]
            self.say(f"step {metrics.step}/{self._steps}  " + "  |  ".join(parts))

    def evaluation(self, metrics: EvalMetrics) -> None:
        self.say(f"step {metrics.step}/{self._steps}  eval loss {evaluation_line(metrics)}")

    def end(self) -> None:
        pass


class LiveDisplay(PlainDisplay):
    """A bar with the newest figures, and below it where the bytes are and who is busy."""

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


class showing:
    """The bar ends however the steps end: a live bar left on would swallow the error's line."""

    def __init__(self, display: Display, steps: int, done: int) -> None:
        self._display, self._steps, self._done = display, steps, done

    def __enter__(self) -> Self:
        self._display.begin(self._steps, self._done)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._display.end()


def headline(metrics: StepMetrics) -> str:
    return f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tok/s"


def evaluation_line(metrics: EvalMetrics) -> str:
    accuracy = "" if metrics.accuracy is None else f"  accuracy {metrics.accuracy:.1%}"
    return f"{metrics.eval_loss:.4f}{accuracy}"


def details(metrics: StepMetrics) -> list[str]:
    """Where the bytes are, and who was busy, as far as this step measured it."""
    parts = []
    if metrics.bytes_by_tier is not None:
        sizes = metrics.bytes_by_tier.items()
        parts.append("  ".join(f"{tier} {format_size(size)}" for tier, size in sizes))
    if metrics.busy is not None:
        parts.append("busy: " + busy_line(metrics.busy))
    return parts


def busy_line(busy: dict[str, float]) -> str:
    """The rows of the timeline as the four devices of a run."""
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
    return f"overspill {command} --resume --out {os.fspath(out)}"
