"""Draws the pictures of docs/moe-layer.md from the records of bench/mpipe.py, without a GPU."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
_COLOURS = ("#2f6db3", "#c8702a", "#2f7d4f", "#7b4fa3", "#7d6a4f", "#18808a")
_INK, _FAINT = "#22272e", "#d5dae0"
_NUMBERS = {"n = 1": "#99a3ad", "n = 2": "#6fa3dc", "n = 4": "#2f6db3", "n = 8": "#7b4fa3"}
_STRATEGIES = ("none", "S1", "S2", "S3", "S4")


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _settings(table: Sequence[Row]) -> list[str]:
    """Labels as in the paper: model(B)."""
    return [f"{row['layer']}\n({_thousands(row['tokens'])})" for row in table]


def _bars(
    axes: "Axes",
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    labelled: bool = True,
) -> None:
    """Groups of bars, one for each label; `labelled`: the series get a legend."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        left = [at - 0.4 + (number + 0.5) * width for at in range(len(values))]
        axes.bar(
            left, values, width * 0.92, color=_COLOURS[number], label=name if labelled else None
        )
    axes.set_xticks(range(len(labels)), labels, fontsize=9)


def draw_8(axes: "Axes", table: Sequence[Row]) -> None:
    first = "FastMoE-like, ms"
    names = [key for key in table[0] if key.endswith(", ms")]
    series = {
        name.removesuffix(", ms"): [row[first] / row[name] for row in table] for name in names
    }
    _bars(axes, _settings(table), series)
    axes.set_ylabel("speedup over FastMoE-like")


def draw_9(upper: "Axes", lower: "Axes", table: Sequence[Row]) -> None:
    """Memory above, speed below."""
    methods = ("FastMoE-like", "FasterMoE-like", "MPipeMoE")
    _bars(upper, _settings(table), {m: [row[f"memory of {m}"] for row in table] for m in methods})
    upper.set_ylabel("memory\n(FastMoE-like = 1)")
    speeds = {
        "FastMoE-like": [1.0 for _ in table],
        "FasterMoE-like": [row["over FastMoE-like"] / row["over FasterMoE-like"] for row in table],
        "MPipeMoE": [row["over FastMoE-like"] for row in table],
    }
    _bars(lower, _settings(table), speeds, labelled=False)
    lower.set_ylabel("speed\n(FastMoE-like = 1)")
    lower.set_xlabel("layer (tokens)", color=_INK)


def draw_10(axes: "Axes", table: Sequence[Row]) -> None:
    labels = [f"{row['layer']}\n{_thousands(row['tokens'])}\nn={row['n']}" for row in table]
    keys = {"measured": "saved, %", "equation 6": "equation 6, %"}
    _bars(axes, labels, {name: [row[key] for row in table] for name, key in keys.items()})
    axes.tick_params(axis="x", labelsize=6)
    axes.set_ylabel("memory saved, %")


def draw_11(axes: "Axes", table: Sequence[Row]) -> None:
    """Each point has its name beside it; methods that run the same code share one."""
    points: dict[tuple[int, int], tuple[Row, list[str]]] = {}
    for row in table:
        label = row["method"].partition(" (")[0]
        if row["n"]:
            label += f", {'fixed' if '(' in row['method'] else 'chosen'} n = {row['n']}"
        label += f"\nstrategy {row['strategy']}" if row["strategy"] != "none" else ""
        place = round(row["MiB"] / 50), round(row["ms"])
        points.setdefault(place, (row, []))[1].append(label)
    for (row, labels), colour in zip(points.values(), _COLOURS, strict=False):
        axes.plot(row["MiB"], row["ms"], "o", color=colour, markersize=10)
        axes.annotate(
            "\n".join(labels), (row["MiB"], row["ms"]), xytext=(0, -10),
            textcoords="offset points", ha="center", va="top", fontsize=10, color=_INK,
        )  # fmt: skip
    axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_xlabel("peak memory, MiB", color=_INK)
    axes.set_ylabel("ms a step")


def draw_12(axes: "Axes", table: Sequence[Row]) -> None:
    tokens = [row["tokens"] for row in table]
    for name, colour in _NUMBERS.items():
        label = f"{name} partition{'' if name == 'n = 1' else 's'}"
        times = [row[f"{name}, ms"] for row in table]
        axes.plot(tokens, times, "o-", color=colour, label=label)
    adaptive = [row["adaptive, ms"] for row in table]
    axes.plot(tokens, adaptive, "--", color=_INK, linewidth=2, label="n chosen by MPipeMoE")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [_thousands(each) for each in tokens], fontsize=9)
    marks = (5, 10, 20, 40, 60)
    axes.set_yticks(marks, [str(each) for each in marks])
    axes.minorticks_off()
    axes.set_xlabel("tokens", color=_INK)
    axes.set_ylabel("ms a step")


def draw_13(axes: "Axes", table: Sequence[Row]) -> None:
    labels = [f"({row['link, GB/s']} GB/s,\n{_thousands(row['tokens'])})" for row in table]
    _bars(axes, labels, {name: [row[f"{name}, ms"] for row in table] for name in _STRATEGIES})
    chosen = [_STRATEGIES.index(row["MPipeMoE"]) for row in table]
    at = [group - 0.4 + (number + 0.5) * 0.16 for group, number in enumerate(chosen)]
    height = [row[f"{row['MPipeMoE']}, ms"] for row in table]
    axes.plot(at, height, "v", color=_INK, markersize=8, label="chosen by MPipeMoE")
    axes.set_ylabel("ms a step")


DRAW: dict[str, Callable[..., None]] = {
    "mpipe-figure-8": draw_8,
    "mpipe-figure-9": draw_9,
    "mpipe-figure-10": draw_10,
    "mpipe-figure-11": draw_11,
    "mpipe-figure-12": draw_12,
    "mpipe-figure-13": draw_13,
}
"""Each gets its axes, from above, and the table."""
_PANELS = {"mpipe-figure-9": 2}
"""How many axes a picture has, if not one."""


def draw_record(record: dict[str, Any], path: Path) -> None:
    # imported here: machines that measure need not have it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = _PANELS.get(record["name"], 1)
    figure = Figure(figsize=(10, 3.1 + 1.5 * count), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(count, 1, squeeze=False)[:, 0]
    DRAW[record["name"]](*panels, record["table"])
    for axes in panels:
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=_FAINT, linewidth=0.8)
        axes.tick_params(length=0, colors=_INK)
        for side in axes.spines.values():
            side.set_visible(False)
    panels[0].set_title(record["config"]["row"], loc="left", fontsize=12, color=_INK)
    if any(axes.get_legend_handles_labels()[1] for axes in panels):
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    print(path.name)


def draw_all(results: Path, out: Path) -> list[str]:
    """The names of the records that were found and drawn."""
    found = [name for name in DRAW if (results / f"{name}.json").is_file()]
    for name in found:
        record = json.loads((results / f"{name}.json").read_text())
        draw_record(record, out / record["config"]["picture"])
    return found
