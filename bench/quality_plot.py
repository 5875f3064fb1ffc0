"""docs/pregate-quality.png, docs/switch-quality.png: figures over the level of the pre-gates."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]


class Panel(NamedTuple):
    """One task."""

    title: str
    label: str
    """Label of the axis."""
    factor: float
    """Factor of the metrics."""


Lines = Mapping[str, tuple[str, str, str]]
"""Label, style and colour of each line, by the end of its metric's name."""
PANELS = {
    "perplexity": Panel("wikitext-2", "validation perplexity", 1),
    "accuracy": Panel("SST-2", "accuracy, %", 100),
}
LINES = {
    "": ("fine-tuned with pre-gates", "-", "#2f6db3"),
    "_not_trained": ("put in after fine-tuning, not trained", "--", "#c8702a"),
    "_before": ("before fine-tuning", ":", "#2f7d4f"),
}
_INK, _FAINT = "#22272e", "#d5dae0"


def points(record: Record, name: str) -> dict[int, dict[str, float]]:
    """The metrics `name`, in which * is the level, by level."""
    names = {level: name.replace("*", str(level)) for level in range(4)}
    metrics = record["metrics"]
    return {level: metrics[key] for level, key in names.items() if key in metrics}


def draw_plot(
    record: Record, path: Path, panels: Mapping[str, Panel] = PANELS, lines: Lines = LINES
) -> None:
    """Draw one panel for each task of the record to `path`. The keys of `panels` begin the names of
    metrics, those of `lines` end them."""
    # Without pyplot no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {
        name: panel
        for name, panel in panels.items()
        if any(points(record, f"{name}_n*{end}") for end in lines)
    }
    figure = Figure(figsize=(5 * len(panels), 4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    for number, (name, (title, label, factor)) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for end, line in lines.items():
            _draw_line(axes, points(record, f"{name}_n*{end}"), factor, *line)
        axes.set_title(title, loc="left", fontsize=12, color=_INK)
        axes.set_ylabel(label, color=_INK)
        _finish(axes)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_line(
    axes: "Axes",
    found: dict[int, dict[str, float]],
    factor: float,
    label: str,
    style: str,
    colour: str,
) -> None:
    """Medians, with bars from the lowest to the highest seed."""
    middle = [factor * one["median"] for one in found.values()]
    below = [factor * (one["median"] - one["low"]) for one in found.values()]
    above = [factor * (one["high"] - one["median"]) for one in found.values()]
    axes.errorbar(
        list(found),
        middle,
        yerr=[below, above],
        linestyle=style,
        color=colour,
        marker="o",
        capsize=3,
        label=label,
    )


def _finish(axes: "Axes") -> None:
    axes.set_xticks(range(4), ["0\n(conventional)", "1", "2", "3"])
    axes.set_xlabel("level N of the pre-gates", color=_INK)
    axes.tick_params(length=0, colors=_INK)
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
