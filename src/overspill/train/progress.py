"""The output of a run: a progress bar on a terminal, plain lines elsewhere. No line of a step is
longer than `WIDTH`."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from overspill.core.sizes import format_size
from overspill.trace.spans import COMPUTE
from overspill.train.metrics import EvalMetrics, StepMetrics

WIDTH = 100
_FEW_RANKS = 4
"""Above this number of ranks, only the fewest and the most token rows are shown."""


class Display:
    """Printer of lines for each logged step, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0
        self._memory = ""

    def say(self, line: str) -> None:
        # soft_wrap: no line breaks, for grep. No markup: paths may contain brackets.
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def begin(self, steps: int, done: int) -> None:
        """Start the display before the first step. `done` steps were taken before a resume."""
        self._steps = steps

    def step(self, metrics: StepMetrics, log: bool) -> None:
        """Show the metrics of a step; print them with `log`."""
        if not log:
            return
        self.say(f"step {metrics.step}/{self._steps}  {headline(metrics)}")
        memory = memory_line(metrics)
        changed = [memory] if memory != self._memory else []
        self._memory = memory
        for line in [*load_lines(metrics), *filter(None, changed)]:
            self.say(f"  {line}")

    def evaluation(self, metrics: EvalMetrics) -> None:
        self.say(f"step {metrics.step}/{self._steps}  eval loss {evaluation_line(metrics)}")

    def end(self) -> None:
        """End the display after the last step."""


class LiveDisplay(Display):
    """Progress bar with the latest metrics; below it busy shares, memory use and evaluation."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TimeRemainingColumn(),
            TextColumn("{task.fields[headline]}"),
            console=console,
        )
        self._details = Text()
        self._shown: list[str] = []
        self._eval: list[str] = []
        self._live = Live(Group(self._progress, self._details), console=console)
        self._task = self._progress.add_task("", total=1, headline="")

    def begin(self, steps: int, done: int) -> None:
        super().begin(steps, done)
        self._progress.update(self._task, total=steps, completed=done)
        self._live.start()

    def step(self, metrics: StepMetrics, log: bool) -> None:
        self._progress.update(self._task, completed=metrics.step, headline=headline(metrics))
        if log:
            self._shown = [*load_lines(metrics), *filter(None, [memory_line(metrics)])]
            self._show()

    def evaluation(self, metrics: EvalMetrics) -> None:
        self._eval = [f"eval loss {evaluation_line(metrics)}"]
        self._show()

    def _show(self) -> None:
        self._details.plain = "\n".join([*self._shown, *self._eval])

    def end(self) -> None:
        self._live.stop()


def make_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else Display(console)


@contextmanager
def showing(display: Display, steps: int, done: int) -> Iterator[None]:
    """Show steps within the block. The display also ends after an error, whose message a live bar
    would hide."""
    display.begin(steps, done)
    try:
        yield
    finally:
        display.end()


def headline(metrics: StepMetrics) -> str:
    return f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tok/s"


def evaluation_line(metrics: EvalMetrics) -> str:
    shares = {} if metrics.accuracy is None else {"accuracy": metrics.accuracy}
    shares |= metrics.scores or {}
    shown = "".join(f"  {name} {share:.1%}" for name, share in shares.items())
    return f"{metrics.eval_loss:.4f}{shown}"


def load_lines(metrics: StepMetrics) -> list[str]:
    """Lines with busy shares and token rows of ranks, as far as this step measured them."""
    lines = []
    shares = {} if metrics.busy is None else busy_shares(metrics.busy)
    if max(shares.values(), default=0.0) >= 0.005:  # else none of this was traced, as on the CPU
        lines.append("busy: " + "  ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    if metrics.rank_rows is not None:
        rows, dash = metrics.rank_rows, " "
        if len(rows) > _FEW_RANKS:
            rows, dash = [min(rows), max(rows)], "–"
        lines.append(
            f"token rows of ranks {dash.join(f'{count:,}' for count in rows)} "
            f"(most over mean {metrics.rank_balance:.2f}, static {metrics.rank_balance_static:.2f})"
        )
    return lines


def memory_line(metrics: StepMetrics) -> str:
    """The bytes of experts by tier, or "" if this step did not measure them."""
    if metrics.bytes_by_tier is None:
        return ""
    sizes = {tier: format_size(size) for tier, size in metrics.bytes_by_tier.items()}
    # the tier of the device that computes: a GPU is named, and its budget shown
    first = sizes.pop("gpu")
    shown = [f"device {first}" if metrics.gpu_use is None else _use_line(metrics.gpu_use)]
    return "  ".join([*shown, *(f"{tier} {size}" for tier, size in sizes.items())])


def _use_line(use: dict[str, int]) -> str:
    gib = {name: f"{count / 2**30:.1f}" for name, count in use.items()}
    what = ", ".join(f"{name} {gib[name]}" for name in ("experts", "slots", "rest"))
    return f"GPU {gib['reserved']} of {gib['budget']} GiB ({what})"


def busy_shares(busy: dict[str, float]) -> dict[str, float]:
    """Busy shares of the rows of the timeline that can limit a run."""
    shares = {row: busy.get(row, 0.0) for row in (COMPUTE, "upload", "download", "optimizer")}
    shares["SSD"] = max(busy.get("ssd read", 0.0), busy.get("ssd write", 0.0))
    return shares


def resume_command(out: str | os.PathLike[str], command: str = "train") -> str:
    return f"overspill {command} --resume --out {shlex.quote(os.fspath(out))}"
