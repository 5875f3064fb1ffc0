"""docs/residency.png: tokens per second of W1 over GPU memory, with other systems' points."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
Point = tuple[float, float]
"""GPU memory in GiB, the peak that torch has reserved, and tokens per second."""

OURS = re.compile(r"residency-w1-[0-9.]+gib(?P<clip>-clip)?")
GPU_ONLY, PEER = "train-w1-gpu-only-16x1024", "train-w1-vs-deepspeed"
MEGATRAIN = (4.8, 3500.0)
"""Measured on the same kind of machine with the code of 2026-04 of the paper (arXiv 2604.05091):
16×1024 tokens a step, clipping, no fp32 master weights (docs/benchmarks.md)."""
# the colours of the other plots
_OURS, _DEEPSPEED, _MEGATRAIN = "#2f6db3", "#c8702a", "#2f7d4f"
_INK, _FAINT = "#22272e", "#d5dae0"


def our_points(records: Sequence[Record], clip: bool) -> list[Point]:
    """The points of W1 in growing budgets, by memory."""
    found = [(OURS.fullmatch(record["name"]), record) for record in records]
    return sorted(
        _point(record, "gpu_memory", "tokens_per_second")
        for match, record in found
        if match is not None and (match["clip"] is not None) == clip
    )


def peer_points(records: Sequence[Record]) -> dict[str, Point]:
    """The points of other systems by their labels, without systems that were not measured."""
    points = {"MegaTrain, clipping": MEGATRAIN}
    works = {
        "16_clip": "DeepSpeed ZeRO-3 offload, clipping",
        "16_gpu": "DeepSpeed, everything on the GPU, no clipping",
    }
    for record in records:
        if record["name"] == PEER:
            for work, label in works.items():
                keys = f"deepspeed_{work}_gpu_memory", f"deepspeed_{work}_tokens_per_second"
                if all(key in record["metrics"] for key in keys):
                    points[label] = _point(record, *keys)
    return points


def _point(record: Record, memory: str, speed: str) -> Point:
    metrics = record["metrics"]
    return metrics[memory]["median"], metrics[speed]["median"]


def draw_plot(records: Sequence[Record], path: Path) -> None:
    """Draws tokens per second over GPU memory to `path`."""
    # Without pyplot no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ours = {
        "Overspill, no clipping": ("-", our_points(records, clip=False)),
        "Overspill, exact clipping": ("--", our_points(records, clip=True)),
    }
    if not any(points for _, points in ours.values()):
        raise SystemExit("there is no record residency-w1-*; run bench/residency.py on a GPU first")
    figure = Figure(figsize=(8, 5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, (style, points) in ours.items():
        if points:
            memory, speed = [gib for gib, _ in points], [each / 1e3 for _, each in points]
            axes.plot(memory, speed, style, color=_OURS, marker="o", linewidth=1.8, label=label)
    for record in records:
        if record["name"] == GPU_ONLY:
            height = record["metrics"]["tokens_per_second"]["median"] / 1e3
            label = "Overspill, everything on the GPU, no clipping"
            axes.axhline(height, color=_INK, linestyle=":", linewidth=1.2, label=label)
    for (label, (gib, each)), marker in zip(peer_points(records).items(), "^sD", strict=False):
        colour = _DEEPSPEED if label.startswith("DeepSpeed") else _MEGATRAIN
        axes.plot(gib, each / 1e3, marker, color=colour, markersize=7, label=label)
    _finish(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9, handlelength=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _finish(axes: "Axes") -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPU memory in use, GiB", color=_INK)
    axes.set_ylabel("thousand tokens per second", color=_INK)
    title = "W1 (5.0 B parameters), 16×1024 tokens a step"
    axes.set_title(title, loc="left", fontsize=12, color=_INK)
    axes.tick_params(length=0, colors=_INK)
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
