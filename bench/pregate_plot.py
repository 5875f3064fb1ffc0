"""Draws the figures of the paper on pre-gated MoE from the records of bench/pregate.py and
bench/switch.py, those that exist, into docs/.

python3 bench/pregate_plot.py
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
Tables = list[list[Row]]
"""The tables of the records of a picture."""


def draw_latency(axes: "Sequence[Axes]", tables: Tables) -> None:
    """Figures 10 and 14: how long a block takes, by its active experts."""
    (only,), (table,) = axes, tables
    counts = sorted({row["active"] for row in table})
    for mode, colour in COLOURS.items():
        own = {row["active"]: row["ms a block"] for row in table if row["mode"] == mode}
        if own:
            # methods with the same times: the later one is narrower, so that both can be seen
            width = 5 if mode == "lookahead" else 1.8
            only.plot(
                list(own), list(own.values()), marker="o", linewidth=width, color=colour,
                label=f"{mode}: {WORDS[mode]}",
            )  # fmt: skip
    only.set_xscale("log", base=2)
    only.set_yscale("log")
    only.set_xticks(counts, [str(count) for count in counts])
    marks = (0.1, 0.3, 1, 3, 10)
    only.set_yticks(marks, [f"{mark:g}" for mark in marks])
    only.minorticks_off()
    only.set_xlabel("active experts of a block", color=_INK)
    only.set_ylabel("ms a block (logarithmic)", color=_INK)


def draw_cache(axes: "Sequence[Axes]", tables: Tables) -> None:
    """Figure 15: tokens a second, by the share of experts that is cached."""
    (only,), (table,) = axes, tables
    shares = sorted({int(row["cached"].rstrip("%")) for row in table})
    for policy, style in STYLES.items():
        for mode, colour in COLOURS.items():
            own = {
                int(row["cached"].rstrip("%")): row["tokens/s"]
                for row in table
                if row["mode"] == mode and row["policy"] in ("none", policy)
            }
            if own:
                only.plot(
                    list(own), list(own.values()), style, marker="o", color=colour,
                    label=f"{mode}; {POLICIES[policy]}",
                )  # fmt: skip
    only.set_xticks(shares, [f"{share}%" for share in shares])
    only.set_xlabel("experts cached on the GPU", color=_INK)
    only.set_ylabel("tokens a second", color=_INK)
    only.set_ylim(bottom=0)


BARS = {
    "ms a block": "ms a block (logarithmic)",
    "tokens/s": "tokens a second (logarithmic)",
    "peak MiB": "peak GPU memory, MiB (logarithmic)",
}
"""Columns of Figures 10 to 12."""


def draw_modes(axes: "Sequence[Axes]", tables: Tables) -> None:
    """Figures 10 to 12: time of a block, speed and memory of each mode, a group for each model."""
    names = [table[0]["model"] for table in tables]
    for (column, words), own in zip(BARS.items(), axes, strict=True):
        _draw_groups(own, tables, column)
        own.set_xticks(range(len(names)), names)
        own.set_ylabel(words, color=_INK)


def draw_disk(axes: "Sequence[Axes]", tables: Tables) -> None:
    """Figure 16: speed of each mode with experts on disk."""
    (only,) = axes
    _draw_groups(only, tables, "tokens/s")
    only.set_xticks(range(len(tables)), [table[0]["model"] for table in tables])
    only.set_ylabel("tokens a second (logarithmic)", color=_INK)


def _draw_groups(axes: "Axes", tables: Tables, column: str) -> None:
    modes = [mode for mode in COLOURS if any(row["mode"] == mode for t in tables for row in t)]
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        places, heights = [], []
        for place, table in enumerate(tables):
            for row in table:
                if row["mode"] == mode:
                    places.append(place + (number - (len(modes) - 1) / 2) * width)
                    heights.append(row[column])
        words = f"{mode}: {WORDS[mode]}"
        axes.bar(places, heights, 0.9 * width, color=COLOURS[mode], label=words)
    if all(row[column] > 0 for table in tables for row in table):  # no GPU, no peak memory
        axes.set_yscale("log")


class Plot(NamedTuple):
    """A picture of some records; records that do not exist are left out."""

    name: str
    records: Sequence[str]
    draw: "Callable[[Sequence[Axes], Tables], None]"
    title: str
    panels: int = 1


PLOTS = (
    Plot(
        "pregate-latency", ("pregate-latency",), draw_latency,
        "Switch-Base-64: time of an MoE block of a pre-gated model",
    ),
    Plot(
        "pregate-cache", ("pregate-cache",), draw_cache,
        "Switch-Base-128, one request: speed by the size of the cache",
    ),
    Plot(
        "switch-modes",
        ("switch-modes-64", "switch-modes-128", "switch-modes-256", "switch-large"), draw_modes,
        "Switch Transformers, one request, nothing cached", len(BARS),
    ),
    Plot(
        "switch-active", ("switch-active",), draw_latency,
        "Switch-Base-64: time of an MoE block by its active experts",
    ),
    Plot(
        "switch-cache", ("switch-cache",), draw_cache,
        "Switch-Large-128, one request: speed by the size of the cache",
    ),
    Plot(
        "switch-ssd", ("switch-large-ssd", "serve-nllb-ssd"), draw_disk,
        "Experts on disk, one request",
    ),
)  # fmt: skip


def draw(plot: Plot, results: Path, out: Path) -> bool:
    """Draws a picture; no-op if none of its records exists."""
    paths = [path for name in plot.records if (path := results / f"{name}.json").is_file()]
    if not paths:
        return False
    tables = [json.loads(path.read_text())["table"] for path in paths]
    figure = Figure(figsize=(8.5, 5.2) if plot.panels == 1 else (13, 5.2), dpi=150)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(1, plot.panels, 1 + number) for number in range(plot.panels)]
    plot.draw(panels, tables)
    for axes in panels:
        axes.tick_params(length=0, colors=_INK)
        axes.grid(color=_FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)
    panels[0].set_title(plot.title, loc="left", fontsize=12, color=_INK)
    legend = panels[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(out / f"{plot.name}.png", format="png")
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pictures; all without any")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    args = parser.parse_args(arguments)
    known = [plot.name for plot in PLOTS]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(known)}")
    for plot in PLOTS:
        if plot.name in (args.names or [plot.name]):
            drawn = draw(plot, args.results, args.out)
            print(f"{plot.name}: {'drawn' if drawn else 'no record'}")


if __name__ == "__main__":
    main()
