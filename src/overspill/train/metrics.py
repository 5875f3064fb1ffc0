"""metrics.jsonl: one line per step and per evaluation, in the order of the run."""

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """What one step gave; what was not measured is None and left out of the file."""

    step: int
    """Counted from 1: the number of steps taken."""
    loss: float
    ce: float
    balance: float
    lr: float
    grad_norm: float | None
    seconds: float
    tokens_per_s: float
    busy: dict[str, float] | None
    """Share of the last traced steps in which each row of the timeline was busy."""
    bytes_by_tier: dict[str, int] | None
    host_peak: int | None
    gpu_peak: int | None


@dataclass(frozen=True)
class EvalMetrics:
    """The mean cross-entropy on the evaluation data after `step` steps."""

    step: int
    eval_loss: float
    accuracy: float | None = None
    """Share of examples that got their label; of classification alone."""


class MetricsFile:
    """Appends lines; a line is with the operating system before the next step begins."""

    def __init__(self, path: Path, first_step: int) -> None:
        """A run that has taken `first_step` steps: lines of later steps are of a lost attempt."""
        kept = [line for line in read_lines(path) if line["step"] <= first_step]
        aside = path.with_suffix(".tmp")
        with open(aside, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in kept)
        os.replace(aside, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        fields = dataclasses.asdict(metrics)
        line = {name: value for name, value in fields.items() if value is not None}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Called before a checkpoint: its step's lines must be on the disk when it is."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file; a last line that a kill cut short is left out."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield line
