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
WORDS = {
    "gpu-only": "all experts are on the GPU",
    "on-demand": "uploaded when the gate has chosen them",
    "prefetch-all": "all experts of the next block are uploaded",
    "lookahead": "uploaded by a guess, one block ahead",
    "pre-gated, copied": "uploaded ahead, as in the paper",
    "pre-gated": "read ahead by the CPU, which computes too",
}
"""The modes of the tables, as legends."""
STYLES = {"LRU": ":", "LFU": "-"}
POLICIES = {"LRU": "least recently used leave", "LFU": "least often used leave"}
_INK, _FAINT = "#22272e", "#d5dae0"
Row = dict[str, Any]


def draw_latency(axes: "Axes", table: list[Row]) -> None:
    """Figures 10 and 14: how long a block takes, by its active experts."""
    counts = sorted({row["active"] for row in table})
    for mode, colour in COLOURS.items():
        own = {row["active"]: row["ms a block"] for row in table if row["mode"] == mode}
        if own:
            # methods with the same times: the later one is narrower, so that both can be seen
            width = 5 if mode == "lookahead" else 1.8
            axes.plot(
                list(own), list(own.values()), marker="o", linewidth=width, color=colour,
                label=f"{mode}: {WORDS[mode]}",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    marks = (0.1, 0.3, 1, 3, 10)
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.set_xlabel("active experts of a block", color=_INK)
    axes.set_ylabel("ms a block (logarithmic)", color=_INK)


def draw_cache(axes: "Axes", table: list[Row]) -> None:
    """Figure 15: tokens a second, by the share of experts that is cached."""
    shares = sorted({int(row["cached"].rstrip("%")) for row in table})
    for policy, style in STYLES.items():
        for mode, colour in COLOURS.items():
            own = {
                int(row["cached"].rstrip("%")): row["tokens/s"]
                for row in table
                if row["mode"] == mode and row["policy"] in ("none", policy)
            }
            if own:
                axes.plot(
                    list(own), list(own.values()), style, marker="o", color=colour,
                    label=f"{mode}; {POLICIES[policy]}",
                )  # fmt: skip
    axes.set_xticks(shares, [f"{share}%" for share in shares])
    axes.set_xlabel("experts cached on the GPU", color=_INK)
    axes.set_ylabel("tokens a second", color=_INK)
    axes.set_ylim(bottom=0)


PLOTS = {
    "pregate-latency": (draw_latency, "Switch-Base-64: time of an MoE block of a pre-gated model"),
    "pregate-cache": (draw_cache, "Switch-Base-128, one request: speed by the size of the cache"),
}


def main() -> None:
    for name, (draw, title) in PLOTS.items():
        record = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
        figure = Figure(figsize=(8.5, 5.2), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw(axes, record["table"])
        axes.tick_params(length=0, colors=_INK)
        axes.grid(color=_FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_title(title, loc="left", fontsize=12, color=_INK)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        figure.savefig(ROOT / "docs" / f"{name}.png", format="png")


if __name__ == "__main__":
    main()
