import dataclasses
import io
import re

import pytest
from rich.console import Console

from overspill.trace.spans import ROWS
from overspill.train.metrics import EvalMetrics, StepMetrics
from overspill.train.progress import WIDTH, Display, LiveDisplay, make_display, showing

BUSY = {"compute": 0.9, "upload": 0.5, "download": 0.25, "optimizer": 0.8, "ssd read": 0.1}
METRICS = StepMetrics(
    step=10, loss=2.5, ce=2.4, balance=1.0, lr=1e-3, grad_norm=1.0, seconds=0.5,
    tokens_per_s=12345.6, busy=BUSY, bytes_by_tier={"gpu": 2**20, "host": 2**30, "disk": 0},
    host_peak=1, gpu_peak=1,
)  # fmt: skip


def _show(terminal: bool) -> tuple[Display, str]:
    out = io.StringIO()
    display = make_display(Console(file=out, force_terminal=terminal, width=200))
    with showing(display, steps=20, done=0):
        display.step(METRICS, log=True)
        display.evaluation(EvalMetrics(10, 2.25))
        display.step(METRICS, log=False)
    return display, out.getvalue()


def test_a_pipe_gets_lines_for_each_logged_step() -> None:
    display, text = _show(terminal=False)
    assert type(display) is Display
    assert text.splitlines() == [
        "step 10/20  loss 2.5000  12,346 tok/s",
        "  busy: compute 90%  upload 50%  download 25%  optimizer 80%  SSD 10%",
        "  device 1.0 MiB  host 1.0 GiB  disk 0 B",
        "step 10/20  eval loss 2.2500",
    ]


def test_nothing_is_said_about_transfers_if_there_are_none() -> None:
    out = io.StringIO()
    # of ranks on the CPU, only the main thread is traced
    idle = dataclasses.replace(METRICS, busy=dict.fromkeys(ROWS, 0.0) | {"main": 0.5})
    Display(Console(file=out, width=200)).step(idle, log=True)
    assert "busy" not in out.getvalue()


def test_a_pipe_gets_the_memory_again_when_it_has_changed() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200))
    more = dataclasses.replace(METRICS, bytes_by_tier={"gpu": 2**21, "host": 0, "disk": 0})
    for metrics in (METRICS, METRICS, more, METRICS):
        display.step(metrics, log=True)
    shown = [line.split()[1] for line in out.getvalue().splitlines() if "device" in line]
    assert shown == ["1.0", "2.0", "1.0"]


def test_the_use_of_the_gpus_budget_is_shown() -> None:
    out = io.StringIO()
    sizes = {"budget": 40, "reserved": 39, "experts": 33, "slots": 1, "rest": 5}
    use = {name: size << 30 for name, size in sizes.items()}
    display = make_display(Console(file=out, width=200))
    display.step(dataclasses.replace(METRICS, gpu_use=use), log=True)
    line = "GPU 39.0 of 40.0 GiB (experts 33.0, slots 1.0, rest 5.0)  host 1.0 GiB"
    assert line in out.getvalue()


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_widest_values_fit_into_100_columns(ranks: int, terminal: bool, on_gpu: bool) -> None:
    tib = 9_999 << 30
    names = ("budget", "reserved", "experts", "slots", "rest")
    widest = dataclasses.replace(
        METRICS, step=1_000_000, loss=1234.5678, tokens_per_s=12_345_678.9,
        busy=dict.fromkeys(ROWS, 1.0), bytes_by_tier={"gpu": tib, "host": tib, "disk": tib},
        gpu_use=dict.fromkeys(names, 199 << 30) if on_gpu else None,
        rank_rows=[9_999_999] * ranks, rank_balance=63.99, rank_balance_static=63.99,
    )  # fmt: skip
    out = io.StringIO()
    # wider than allowed: what does not fit would be cut off
    display = make_display(Console(file=out, force_terminal=terminal, width=200))
    with showing(display, steps=1_000_000, done=0):
        display.step(widest, log=True)
        display.evaluation(EvalMetrics(1_000_000, 1234.5678, accuracy=1.0))
    lines = [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip()
        for line in out.getvalue().replace("\r", "\n").splitlines()
    ]
    assert any("12,345,679 tok/s" in line for line in lines)
    assert any("disk 9.8 TiB" in line for line in lines)
    assert max(map(len, lines)) <= WIDTH


def test_a_terminal_gets_a_bar_with_everything() -> None:
    display, text = _show(terminal=True)
    assert type(display) is LiveDisplay
    for part in ("loss 2.5000", "12,346 tok/s", "eval loss 2.2500", "host 1.0 GiB", "upload 50%"):
        assert part in text


def test_paths_are_not_taken_for_markup() -> None:
    out = io.StringIO()
    Display(Console(file=out, width=20)).say("runs/[bold]/a path longer than the console")
    assert out.getvalue() == "runs/[bold]/a path longer than the console\n"


def test_accuracy_is_shown_beside_the_loss() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=80))
    display.begin(20, 0)
    display.evaluation(EvalMetrics(5, 0.5, accuracy=0.875))
    assert out.getvalue() == "step 5/20  eval loss 0.5000  accuracy 87.5%\n"
