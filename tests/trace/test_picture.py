"""The picture: drawn for every row, many spans and odd ones."""

import struct
import time
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from overspill.core.errors import ConfigError
from overspill.trace.picture import _stacked, draw_timeline
from overspill.trace.spans import ROWS, Span


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def two_steps() -> list[Span]:
    """Two layers with two waves each, forward and backward, and dense work between them."""
    spans, at = [], 0
    for _ in range(2):
        for name in ("forward 0.0-3", "forward 0.4-7", "dense", "forward 1.0-7", "dense",
                     "backward 1.0-7", "dense", "backward 0.0-3", "backward 0.4-7"):  # fmt: skip
            spans.append(Span("compute", name, at, at + 900))
            spans.append(Span("upload", "expert 0.0", at + 10, at + 500))
            at += 1000
        spans.append(Span("compute", "step", at, at))
    return spans


def test_three_thousand_spans_are_drawn_in_a_moment(tmp_path: Path) -> None:
    spans = [
        Span(row, f"{row} {n}", 700_000 * n, 700_000 * n + 500_000, 17 << 20)
        for row in (*ROWS, "my own row")
        for n in range(400)
    ]
    began = time.process_time()  # a busy machine takes no more of it
    draw_timeline(spans, tmp_path / "runs" / "t.png", "many")
    assert time.process_time() - began < 20
    width, height = png_size(tmp_path / "runs" / "t.png")
    assert width > 1500
    assert height > 500


@pytest.mark.parametrize(
    "length_ns", [0, pytest.param(40_000, marks=pytest.mark.slow), 9_000_000_000]
)
def test_any_length_of_time_is_drawn(tmp_path: Path, length_ns: int) -> None:
    draw_timeline([Span("main", "one", 7, 7 + length_ns)], tmp_path / "t.png", "short or long")
    assert png_size(tmp_path / "t.png")[0] > 1000


@pytest.mark.slow
def test_more_rows_make_a_higher_picture(tmp_path: Path) -> None:
    draw_timeline([Span("main", "a", 0, 9)], tmp_path / "one.png", "one row")
    draw_timeline([Span(row, "a", 0, 9) for row in ROWS], tmp_path / "all.png", "all rows")
    assert png_size(tmp_path / "all.png")[1] > 2 * png_size(tmp_path / "one.png")[1]


def test_only_spans_that_overlap_share_the_height() -> None:
    alone, first, second = (
        Span("main", *rest) for rest in (("a", 0, 9), ("b", 9, 30), ("c", 20, 40))
    )
    touching = Span("main", "d", 39, 50)  # by no more than the slack
    assert list(_stacked([second, touching, first, alone], slack_ns=1)) == [
        (alone, 0, 1),
        (first, 0, 2),
        (second, 1, 2),
        (touching, 0, 1),
    ]


def test_training_is_drawn_with_its_passes_and_the_ends_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str] = []
    annotate = Axes.annotate

    def noting(axes: Axes, text: str, *args: Any, **how: Any) -> object:
        words.append(text)
        return annotate(axes, text, *args, **how)

    monkeypatch.setattr(Axes, "annotate", noting)
    draw_timeline(two_steps(), tmp_path / "t.png", "two steps")
    passes_and_steps = [w for w in words if w in ("forward", "backward") or w.startswith("step")]
    assert passes_and_steps == ["forward", "backward"] * 2 + ["step 1 ends", "step 2 ends"]
    words.clear()
    serving = [span for span in two_steps() if not span.name.startswith(("backward", "step"))]
    draw_timeline(serving, tmp_path / "t.png", "no training")
    assert "forward" not in words


def test_nothing_to_draw_says_why(tmp_path: Path) -> None:
    for spans in ([], [Span("compute", "step", 5, 5)]):
        with pytest.raises(ConfigError, match="was the recorder started"):
            draw_timeline(spans, tmp_path / "t.png", "empty")
