"""Draws docs/pregate-latency.png and docs/pregate-cache.png from the records of bench/pregate.py.

python3 bench/pregate_plot.py
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {
    "gpu-only": "#2f7d4f",
    "on-demand": "#c8702a",
    "prefetch-all": "#7d6a4f",
    "lookahead": "#7b4fa3",
    "pre-gated, copied": "#6fa3dc",
    "pre-gated": "#2f6db3",
}
STYLES = {"none": "-", "LRU": ":", "LFU": "-"}
_INK, _FAINT = "#22272e", "#d5dae0"
Row = dict[str, Any]


def draw_latency(axes: "Axes", table: list[Row]) -> None:
    """Figures 10 and 14: how long a block takes, by its active experts."""
    counts = sorted({row["active"] for row in table})
    for mode, colour in COLOURS.items():
        own = {row["active"]: row["ms a block"] for row in table if row["mode"] == mode}
        if own:
            axes.plot(list(own), list(own.values()), marker="o", color=colour, label=mode)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("active experts of a block", color=_INK)
    axes.set_ylabel("ms a block", color=_INK)


def draw_cache(axes: "Axes", table: list[Row]) -> None:
    """Figure 15: tokens a second, by the share of experts that is cached."""
    for policy in ("LRU", "LFU"):
        for mode, colour in COLOURS.items():
            own = {
                int(row["cached"].rstrip("%")): row["tokens/s"]
                for row in table
                if row["mode"] == mode and row["policy"] in ("none", policy)
            }
            if own:
                label = f"{mode}, {policy}"
                style = STYLES[policy]
                axes.plot(
                    list(own), list(own.values()), style, marker="o", color=colour, label=label
                )
    axes.set_xlabel("experts cached, %", color=_INK)
    axes.set_ylabel("tokens a second", color=_INK)
    axes.set_ylim(bottom=0)


PLOTS = {"pregate-latency": draw_latency, "pregate-cache": draw_cache}


def main() -> None:
    for name, draw in PLOTS.items():
        record = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
        figure = Figure(figsize=(7, 4), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw(axes, record["table"])
        axes.tick_params(length=0, colors=_INK)
        axes.grid(color=_FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(ROOT / "docs" / f"{name}.png", format="png")


if __name__ == "__main__":
    main()
