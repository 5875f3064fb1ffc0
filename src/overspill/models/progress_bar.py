"""A progress bar on the terminal for jobs that report (what, done, total)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class TerminalProgress:
    """Progress bar of one job at a time, from its first report to its last, in bytes or items."""

    def __init__(self, counted: bool = False) -> None:
        self._counted = counted
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = _make_bar(self._counted)
            self._bar.start()
            self._task = self._bar.add_task(what, total=total)
        assert self._task is not None
        self._bar.update(self._task, description=what, completed=done, total=total)
        if done >= total:
            self.stop()

    @property
    def shown(self) -> bool:
        """Whether a job is being shown."""
        return self._bar is not None

    def stop(self) -> None:
        """Removes the bar, also after a failed job."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar(counted: bool) -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn() if counted else DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
