"""metrics.jsonl: one line per step and per evaluation."""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.core.errors import DiskError
from overspill.core.json_text import parse_json


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step. The file omits values that are None: they were not measured."""

    step: int
    """Number of steps taken, from 1."""
    loss: float
    ce: float
    balance: float
    lr: float
    grad_norm: float | None
    seconds: float
    tokens_per_s: float
    busy: dict[str, float] | None
    """Share of the last traced steps in which each trace lane was busy."""
    bytes_by_tier: dict[str, int] | None
    host_peak: int | None
    gpu_peak: int | None
    gpu_use: dict[str, int] | None = None
    """The budget of the GPU, its reserved part, and the uses of that part."""
    rank_rows: list[int] | None = None
    """Token rows that each rank has computed in the last passes."""
    rank_balance: float | None = None
    """Token rows of the busiest rank over the mean."""
    rank_balance_static: float | None = None
    """`rank_balance` if owners computed all rows of their experts."""
    predictor: dict[str, float] | None = None
    """The accuracies of the popularity predictor by distance, and how much it has learned."""


@dataclass(frozen=True)
class EvalMetrics:
    """Mean cross-entropy on the evaluation data after `step` steps."""

    step: int
    eval_loss: float
    accuracy: float | None = None
    """Share of examples with the right label; for classification only."""
    scores: dict[str, float] | None = None
    """Mean scores of generated answers, between 0 and 1; with --metric only."""


class MetricsFile:
    """Appends lines. Each is passed to the operating system before the next step begins."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Open the file, and remove lines after `first_step`: they belong to an attempt that was
        killed."""
        kept = [line for line in read_lines(path) if line["step"] <= first_step]
        aside = path.with_suffix(".tmp")
        self._path = path
        with self._written():
            with open(aside, "w", encoding="utf-8") as out:
                out.writelines(json.dumps(line) + "\n" for line in kept)
            os.replace(aside, path)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        fields = dataclasses.asdict(metrics)
        line = {name: value for name, value in fields.items() if value is not None}
        with self._written():
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Force all lines to the disk, before a checkpoint is written."""
        with self._written():
            os.fsync(self._file.fileno())

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(
                f"{self._path} cannot be written ({error.strerror}); free some space, then "
                "continue with --resume; checkpoints are not affected"
            ) from error

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file, without incomplete ones of a killed process."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = parse_json(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield line
