import dataclasses
import io

from rich.console import Console

from overspill.train.metrics import EvalMetrics, StepMetrics
from overspill.train.progress import Display, LiveDisplay, make_display, showing

BUSY = {"gpu compute": 0.9, "upload": 0.5, "download": 0.25, "optimizer": 0.8, "ssd read": 0.1}
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


def test_a_pipe_gets_one_line_for_each_logged_step() -> None:
    display, text = _show(terminal=False)
    assert type(display) is Display
    assert text.splitlines() == [
        "step 10/20  loss 2.5000  12,346 tok/s  |  gpu 1.0 MiB  host 1.0 GiB  disk 0 B  |  busy: "
        "GPU 90%  PCIe up 50%  PCIe down 25%  CPU optimizer 80%  SSD 10%",
        "step 10/20  eval loss 2.2500",
    ]


def test_the_use_of_the_gpus_budget_is_shown() -> None:
    out = io.StringIO()
    sizes = {"budget": 40, "reserved": 39, "experts": 33, "slots": 1, "rest": 5}
    use = {name: size << 30 for name, size in sizes.items()}
    display = make_display(Console(file=out, width=200))
    display.step(dataclasses.replace(METRICS, gpu_use=use), log=True)
    line = "gpu 39.0 GiB of 40.0 GiB (experts 33.0 GiB, slots 1.0 GiB, rest 5.0 GiB)  host 1.0 GiB"
    assert line in out.getvalue()


def test_a_terminal_gets_a_bar_with_everything() -> None:
    display, text = _show(terminal=True)
    assert type(display) is LiveDisplay
    for part in ("loss 2.5000", "12,346 tok/s", "eval 2.2500", "host 1.0 GiB", "PCIe up 50%"):
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
