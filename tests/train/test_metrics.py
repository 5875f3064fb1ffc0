from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from overspill.train.metrics import EvalMetrics, MetricsFile, StepMetrics, read_lines
from overspill.train.plot import draw_loss


def make_metrics(step: int, busy: dict[str, float] | None = None) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=3.5 / step,
        ce=3.4 / step,
        balance=1.0,
        lr=1e-3,
        grad_norm=None,
        seconds=0.5,
        tokens_per_s=1234.5,
        busy=busy,
        bytes_by_tier=None if busy is None else {"gpu": 2**20, "host": 2**30, "disk": 0},
        host_peak=None,
        gpu_peak=None,
    )


def test_a_resumed_file_reads_as_one_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, first_step=0)
    for step in (1, 2, 3):
        first.write(make_metrics(step))
    first.write(EvalMetrics(3, 3.3))
    first.close()
    with open(path, "a") as out:
        out.write('{"step": 4, "loss": 1.')  # the kill came here
    resumed = MetricsFile(path, first_step=2)
    resumed.write(make_metrics(3))
    resumed.close()
    lines = list(read_lines(path))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert "eval_loss" not in lines[-1]


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", first_step=0)
    file.write(make_metrics(1))
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert line["tokens_per_s"] == 1234.5
    assert "busy" not in line
    file.close()


def test_losses_are_drawn_also_when_there_are_none(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", first_step=0)
    for number in range(2):
        picture = tmp_path / f"{number}.png"
        draw_loss(tmp_path / "metrics.jsonl", picture, "nano")
        assert picture.read_bytes().startswith(b"\x89PNG")
        file.write(make_metrics(1))
        file.write(EvalMetrics(1, 3.3))
    assert (tmp_path / "0.png").read_bytes() != (tmp_path / "1.png").read_bytes()
    file.close()


def test_the_ticks_of_a_short_run_are_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", first_step=0)
    for step in range(1, 5):
        file.write(make_metrics(step))
    file.close()
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    draw_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "nano")
    (ticks,) = [figure.axes[0].get_xticks() for figure in figures]
    assert len(ticks) > 1
    assert all(tick == round(tick) for tick in ticks)
