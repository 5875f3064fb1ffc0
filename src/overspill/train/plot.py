"""loss.png: the losses of a run by step."""

from pathlib import Path

from overspill.train.metrics import read_lines

_INK, _FAINT, _TRAIN, _EVAL = "#22272e", "#d5dae0", "#2f6db3", "#c8702a"
_SMOOTHING = 0.8


def draw_loss(metrics: Path, path: Path, title: str) -> None:
    """Draws the training loss (faint), its running mean and the evaluation loss."""
    # Imported late: matplotlib takes a second. Without pyplot no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = list(read_lines(metrics))
    train = [(line["step"], line["ce"]) for line in lines if "ce" in line]
    evals = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    figure = Figure(figsize=(8, 4.5), dpi=160)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.1, 0.12, 0.87, 0.79))  # faster than a layout engine
    if train:
        steps, losses = [step for step, _ in train], [loss for _, loss in train]
        axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(losses), color=_TRAIN, linewidth=1.8, label="train")
    if evals:
        steps, losses = [step for step, _ in evals], [loss for _, loss in evals]
        axes.plot(steps, losses, color=_EVAL, linewidth=1.8, marker="o", markersize=4, label="eval")
    axes.set_xlabel("step", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("cross-entropy (nats per token)", color=_INK)
    axes.set_title(title, loc="left", fontsize=12, color=_INK)
    axes.tick_params(length=0, colors=_INK)
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    if train or evals:
        axes.legend(frameon=False)
    figure.savefig(path, format="png")


def _smooth(values: list[float]) -> list[float]:
    """An exponential running mean with bias correction, as in Adam."""
    mean, weight, smoothed = 0.0, 0.0, []
    for value in values:
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append(mean / weight)
    return smoothed
