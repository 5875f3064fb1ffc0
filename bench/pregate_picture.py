"""Draws docs/pre-gates.png: when experts are uploaded, with conventional gates and with pre-gates.

python3 bench/pregate_picture.py
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OUT = Path(__file__).resolve().parents[1] / "docs" / "pre-gates.png"
COLORS = {"attention": "#c7d7ea", "gate": "#2f7d4f", "experts": "#62ae7f", "upload": "#6ea1db"}
ATTENTION, GATE, EXPERTS, UPLOAD = 1.0, 0.35, 0.8, 1.6
BLOCKS = 3


def bar(axes: Any, row: int, start: float, length: float, kind: str, label: str) -> float:
    axes.barh(row, length, 0.7, start, color=COLORS[kind], edgecolor="white")
    color = "white" if kind == "gate" else "#1d2733"
    axes.text(start + length / 2, row, label, ha="center", va="center", fontsize=8, color=color)
    return start + length


def conventional(axes: Any) -> None:
    time = 0.0
    for block in range(BLOCKS):
        time = bar(axes, 0, time, ATTENTION, "attention", "attention")
        time = bar(axes, 0, time, GATE, "gate", f"{block}")
        arrived = bar(axes, 1, time, UPLOAD, "upload", f"experts of block {block}")
        time = bar(axes, 0, arrived, EXPERTS, "experts", "experts")


def pregated(axes: Any) -> None:
    time, free = 0.0, 0.0
    arrived: dict[int, float] = {}
    for block in range(BLOCKS):
        time = bar(axes, 0, time, ATTENTION, "attention", "attention")
        asked = [0, 1] if block == 0 else [block + 1]
        for later in asked:
            if later < BLOCKS:
                time = bar(axes, 0, time, GATE, "gate", f"{later}")
                free = arrived[later] = bar(
                    axes, 1, max(time, free), UPLOAD, "upload", f"experts of block {later}"
                )
        time = bar(axes, 0, max(time, arrived[block]), EXPERTS, "experts", "experts")


def main() -> None:
    figure, both = pyplot.subplots(2, 1, figsize=(9, 3.4), sharex=True)
    for axes, draw, title in zip(
        both,
        (conventional, pregated),
        (
            "A gate chooses experts of its own block",
            "A pre-gate of level 1 chooses one block earlier",
        ),
        strict=True,
    ):
        draw(axes)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks([0, 1], ["compute", "upload"], fontsize=9)
        axes.invert_yaxis()
        axes.set_xticks([])
        for side in ("top", "right", "bottom", "left"):
            axes.spines[side].set_visible(False)
    both[1].set_xlabel("time; a dark field is a gate, with the block that it chooses experts for")
    figure.tight_layout()
    figure.savefig(OUT, dpi=150)


if __name__ == "__main__":
    main()
