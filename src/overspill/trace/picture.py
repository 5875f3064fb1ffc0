"""Draws a timeline as a PNG, for the docs and the run folder."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overspill.core.errors import ConfigError
from overspill.trace.spans import (
    COMPUTE,
    STEP,
    Span,
    assign_lanes,
    busy_shares,
    passes,
    rows_in_order,
    step_ends,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Two alternating shades per row keep adjacent spans distinguishable.
_SHADES = {
    "compute": ("#2f7d4f", "#5fae7f"),
    "cpu compute": ("#b0413e", "#dd8784"),
    "cpu load": ("#8a6d1d", "#c2a75a"),
    "upload": ("#2f6db3", "#6fa3dc"),
    "download": ("#7b4fa3", "#ab84cf"),
    "optimizer": ("#c8702a", "#eba267"),
    "ssd read": ("#18808a", "#5cb7bf"),
    "ssd write": ("#a8456b", "#d6829f"),
    "main": ("#5c6773", "#99a3ad"),
}
_OTHER = ("#7d6a4f", "#b3a184")
_PASSES = {"forward": ("#dfe6ee", "#22272e"), "backward": ("#8794a3", "#ffffff")}
"""Fill and text colour of the pass names above the rows."""
_INK, _FAINT = "#22272e", "#d5dae0"
_BAR_HEIGHT = 0.76
_PASS_TOP, _PASS_HEIGHT = -0.98, 0.34


def draw_timeline(
    spans: Iterable[Span],
    path: str | Path,
    title: str,
    colours: Mapping[Span, str] | None = None,
) -> None:
    """Draw one band of bars per row, and at the right the busy share of each row.

    Overlapping spans of a row share its band. Spans in `colours`, dark ones, have these colours
    instead of their row's. In training, a band above the rows names the passes, and lines mark the
    ends of steps.
    """
    # Imported here because matplotlib takes a second to import. Not pyplot: it keeps global state
    # and may need a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    given = list(spans)
    spans = [span for span in given if (span.row, span.name) != (COMPUTE, STEP)]
    if not spans:
        raise ConfigError(f"there are no spans to draw in {path}; was the recorder started?")
    rows, trained = rows_in_order(spans), passes(given)
    trained = trained if any(span.name == "backward" for span in trained) else []
    since_ns = min(span.start_ns for span in spans)
    until_ns = max(max(span.end_ns for span in spans), since_ns + 1)
    unit, unit_ns = _time_unit(until_ns - since_ns)

    figure = Figure(
        figsize=(13, 1.5 + 0.62 * (len(rows) + 0.5 * bool(trained))),
        dpi=160,
        layout=ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.15),
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(0, (until_ns - since_ns) / unit_ns)
    axes.set_ylim(len(rows) - 0.5, -1.05 if trained else -0.5)  # the first row on top
    figure.draw_without_rendering()  # computes the widths, which decide what text fits a bar
    for position, row in enumerate(rows):
        own = [span for span in spans if span.row == row]
        _draw_row(axes, own, position, since_ns, unit_ns, colours or {})
    _label_rows(axes, spans, rows, since_ns, until_ns)
    if trained:
        _mark_passes(axes, trained, since_ns, unit_ns)
        _mark_steps(axes, step_ends(given), since_ns, unit_ns)

    axes.set_yticks(range(len(rows)), rows, fontsize=11, color=_INK)
    axes.set_xlabel(f"time ({unit})", color=_INK)
    axes.set_title(title, loc="left", fontsize=13, color=_INK, pad=16)
    axes.tick_params(length=0, colors=_INK)
    axes.grid(axis="x", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_row(
    axes: "Axes",
    spans: Sequence[Span],
    position: int,
    since_ns: int,
    unit_ns: float,
    chosen: Mapping[Span, str],
) -> None:
    from matplotlib.collections import PolyCollection

    shades = _SHADES.get(spans[0].row, _OTHER)
    top = position - _BAR_HEIGHT / 2
    # a faint background shows idle time
    axes.axhspan(top, top + _BAR_HEIGHT, color=shades[1], alpha=0.10, linewidth=0)
    pixel_ns = axes.get_xlim()[1] * unit_ns / axes.get_window_extent().width
    bars, colours = [], []
    shade_of_lane: dict[int, int] = {}
    for span, lane, lanes in _stacked(spans, int(pixel_ns)):
        left, right = ((ns - since_ns) / unit_ns for ns in (span.start_ns, span.end_ns))
        upper, lower = (top + _BAR_HEIGHT * edge / lanes for edge in (lane, lane + 1))
        bars.append([(left, upper), (right, upper), (right, lower), (left, lower)])
        shade = shade_of_lane[lane] = 1 - shade_of_lane.get(lane, 1)
        colours.append(chosen.get(span, shades[shade]))
        # a character is about 10 pixels wide; text wider than its bar is omitted
        if lanes <= 2 and (span.end_ns - span.start_ns) / pixel_ns > 10 * len(span.name) + 8:
            at = (left + right) / 2, (upper + lower) / 2
            color = _INK if shade and span not in chosen else "white"
            axes.annotate(span.name, at, ha="center", va="center", fontsize=8, color=color)
    # One collection, because thousands of patches take seconds to draw. Not snapped to pixels, so
    # that bars thinner than a pixel blend to a shade of the busy share.
    axes.add_collection(PolyCollection(bars, facecolors=colours, linewidths=0, snap=False))


def _mark_passes(axes: "Axes", trained: Sequence[Span], since_ns: int, unit_ns: float) -> None:
    pixel_ns = axes.get_xlim()[1] * unit_ns / axes.get_window_extent().width
    for span in trained:
        fill, ink = _PASSES[span.name]
        left, width = (span.start_ns - since_ns) / unit_ns, (span.end_ns - span.start_ns) / unit_ns
        axes.broken_barh([(left, width)], (_PASS_TOP, _PASS_HEIGHT), color=fill, linewidth=0)
        if (span.end_ns - span.start_ns) / pixel_ns > 12 * len(span.name) + 8:
            at = left + width / 2, _PASS_TOP + _PASS_HEIGHT / 2
            axes.annotate(span.name, at, ha="center", va="center", fontsize=9, color=ink)


def _mark_steps(axes: "Axes", ends: Sequence[int], since_ns: int, unit_ns: float) -> None:
    for number, end_ns in enumerate(ends, start=1):
        at = (end_ns - since_ns) / unit_ns
        axes.axvline(at, color=_INK, linewidth=1.1, linestyle=(0, (4, 3)))
        # above the axes: bars are as high as the space between two rows
        text: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "xytext": (-3, 3)}
        axes.annotate(
            f"step {number} ends", (at, 1.0), textcoords="offset points", ha="right", va="bottom",
            fontsize=8, color=_INK, annotation_clip=False, **text,
        )  # fmt: skip


def _stacked(spans: Iterable[Span], slack_ns: int) -> Iterator[tuple[Span, int, int]]:
    """Each span of a row with its lane and the number of lanes there: more than one only where
    spans overlap by more than `slack_ns`."""
    cluster: list[Span] = []
    end_ns = 0
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        if cluster and end_ns <= span.start_ns + slack_ns:
            yield from _split(cluster, slack_ns)
            cluster = []
        end_ns = max(end_ns, span.end_ns) if cluster else span.end_ns
        cluster.append(span)
    yield from _split(cluster, slack_ns)


def _split(cluster: Iterable[Span], slack_ns: int) -> Iterator[tuple[Span, int, int]]:
    placed = assign_lanes(cluster, slack_ns)
    lanes = 1 + max((lane for _, lane in placed), default=0)
    for span, lane in placed:
        yield span, lane, lanes


def _label_rows(
    axes: "Axes", spans: Sequence[Span], rows: Sequence[str], since_ns: int, until_ns: int
) -> None:
    """Two columns at the right: the busy share, and the bandwidth while busy."""
    busy = busy_shares(spans, since_ns, until_ns)
    moved = {row: sum(span.bytes for span in spans if span.row == row) for row in rows}
    columns = [(1.05, "busy"), (1.13, "GB/s\nwhen busy")][: 1 + any(moved.values())]
    # x in widths of the axes, y in rows
    style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right"}
    for x, heading in columns:
        axes.text(x, -0.62, heading, va="bottom", fontsize=9, **style)
    for position, row in enumerate(rows):
        colour = _SHADES.get(row, _OTHER)[0]
        texts = [f"{busy[row]:.0%}"]
        if moved[row] and busy[row] > 0:
            texts.append(f"{moved[row] / (busy[row] * (until_ns - since_ns)):.1f}")
        for (x, _), text in zip(columns, texts, strict=False):
            bold: dict[str, Any] = {"fontsize": 11, "fontweight": "bold", "color": colour}
            axes.text(x, position, text, va="center", **style, **bold)


def _time_unit(length_ns: int) -> tuple[str, float]:
    if length_ns >= 2e9:
        return "s", 1e9
    return ("ms", 1e6) if length_ns >= 2e6 else ("µs", 1e3)
