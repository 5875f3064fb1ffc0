"""Figure 6 of APTMoE for this machine: times to load and to compute one expert, by tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from overspill.hardware.profile import ExpertCosts
from overspill.probe.comparison import Comparison, comparisons

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# the colours of the timeline
_LOAD, _CPU, _GPU = "#2f6db3", "#c8702a", "#2f7d4f"
_INK, _FAINT = "#22272e", "#d5dae0"


def draw_costs(costs: ExpertCosts, path: Path, title: str, device: str = "GPU") -> None:
    """Forward and backward side by side; a marker shows up to how many tokens the CPU is faster
    than load and GPU together."""
    # Imported here because matplotlib is slow to import; without pyplot, no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, comparison in zip(panels, comparisons(costs), strict=True):
        _draw_panel(axes, comparison, costs.cpu_beside)
    panels[0].set_ylabel("milliseconds for one expert", color=_INK)
    _draw_legend(panels[0], device)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_panel(axes: "Axes", comparison: Comparison, cpu_beside: float) -> None:
    from matplotlib.ticker import StrMethodFormatter

    tokens = _grid(comparison)
    last = tokens[-1]
    cpu = [comparison.cpu(count) for count in tokens]
    lines = [
        ([comparison.load] * len(tokens), _LOAD, "-", 1.8),
        (cpu, _CPU, "-", 2.2),
        ([time * cpu_beside for time in cpu], _CPU, ":", 1.4),
        ([comparison.gpu(count) for count in tokens], _GPU, "-", 1.8),
        ([comparison.load_and_gpu(count) for count in tokens], _INK, "--", 1.2),
    ]
    for seconds, colour, style, width in lines:
        axes.plot(tokens, _ms(seconds), color=colour, linestyle=style, linewidth=width)
    for curve, colour in ((comparison.cpu, _CPU), (comparison.gpu, _GPU)):
        shown = [count for count in curve.tokens if count <= last]
        points = shown, _ms([curve(count) for count in shown])
        axes.plot(*points, color=colour, marker="o", markersize=4, linewidth=0)
    _mark_crossing(axes, comparison, last)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlim(tokens[0] / 1.25, last * 1.25)
    axes.set_xticks(comparison.cpu.tokens, [str(count) for count in comparison.cpu.tokens])
    axes.set_xlabel("tokens of the expert", color=_INK)
    axes.set_title(comparison.name, loc="left", fontsize=11, color=_INK)
    axes.tick_params(length=0, colors=_INK, which="both")
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _mark_crossing(axes: "Axes", comparison: Comparison, last: int) -> None:
    """Mark the crossing of the times, and state which side is faster."""
    crossing = comparison.crossing(last)
    if 0 < crossing < last:
        height = comparison.load_and_gpu(crossing) * 1e3
        axes.plot(crossing, height, color=_INK, marker="o", markersize=7, fillstyle="none")
        axes.axvspan(1 / 1.25, crossing, color=_CPU, alpha=0.07, linewidth=0)
        words = f"CPU faster\nup to {crossing} token" + "s" * (crossing > 1)
    else:
        words = "CPU faster\nfor all of these" if crossing else "CPU slower\neven at 1 token"
    axes.text(0.03, 0.96, words, transform=axes.transAxes, va="top", fontsize=10, color=_INK)


def _draw_legend(axes: "Axes", device: str) -> None:
    entries = [
        ("load", _LOAD, "-"),
        ("CPU", _CPU, "-"),
        ("CPU during loads", _CPU, ":"),
        (device, _GPU, "-"),
        (f"load, then {device}", _INK, "--"),
    ]
    handles = [
        axes.plot([], [], color=colour, linestyle=style, label=name)[0]
        for name, colour, style in entries
    ]
    axes.figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
    )


def _grid(comparison: Comparison) -> list[int]:
    """Up to 200 numbers of tokens, up to the highest that was measured on the CPU."""
    last = max(comparison.cpu.tokens[-1], 2)
    count = 200
    return sorted({round(last ** (step / count)) for step in range(count + 1)})


def _ms(seconds: Sequence[float]) -> list[float]:
    return [time * 1e3 for time in seconds]
