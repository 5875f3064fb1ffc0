"""Spans of time on the named rows of a timeline, and the passes of a training run in them."""

from collections.abc import Iterable
from typing import NamedTuple

COMPUTE = "compute"
"""The row of the device that computes: a GPU, or a CPU in its place."""
STEP = "step"
"""Name of the span without length on that row at which an optimizer step has ended."""
ROWS = (
    COMPUTE,
    "cpu compute",
    "cpu load",
    "upload",
    "download",
    "optimizer",
    "ssd read",
    "ssd write",
    "main",
)
"""The rows of a timeline in their order; other rows follow."""


class Span(NamedTuple):
    """An activity on `row`; times are those of `time.perf_counter_ns`."""

    row: str
    name: str
    start_ns: int
    end_ns: int
    bytes: int = 0


def busy_shares(spans: Iterable[Span], since_ns: int, until_ns: int) -> dict[str, float]:
    """The share of [since_ns, until_ns] that the union of each row's spans covers."""
    if until_ns <= since_ns:
        raise ValueError(f"until_ns={until_ns} must come after since_ns={since_ns}")
    covered_ns: dict[str, int] = dict.fromkeys(ROWS, 0)
    reached_ns: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        start_ns = max(span.start_ns, reached_ns.get(span.row, since_ns))
        end_ns = min(span.end_ns, until_ns)
        covered_ns.setdefault(span.row, 0)
        if end_ns > start_ns:
            covered_ns[span.row] += end_ns - start_ns
            reached_ns[span.row] = end_ns
    return {row: covered / (until_ns - since_ns) for row, covered in covered_ns.items()}


def assign_lanes(spans: Iterable[Span], slack_ns: int = 0) -> list[tuple[Span, int]]:
    """The spans sorted by start, each with the lowest free lane (0, 1, …) of its row: spans that
    overlap by more than `slack_ns` get different lanes."""
    free_ns: dict[str, list[int]] = {}
    placed = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        lanes = free_ns.setdefault(span.row, [])
        for lane, free in enumerate(lanes):
            if free <= span.start_ns + slack_ns:
                lanes[lane] = span.end_ns
                break
        else:
            lane = len(lanes)
            lanes.append(span.end_ns)
        placed.append((span, lane))
    return placed


def rows_in_order(spans: Iterable[Span]) -> list[str]:
    """The rows that have spans: first rows of `ROWS` in their order, then others by name."""
    used = {span.row for span in spans}
    return [row for row in ROWS if row in used] + sorted(used.difference(ROWS))


def passes(spans: Iterable[Span]) -> list[Span]:
    """One span for each forward and backward pass of the model: from its first wave of experts to
    its last one."""
    found: list[Span] = []
    between = True  # also two forwards in a row are two passes if a step is between them
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        if span.row != COMPUTE:
            continue
        name = span.name.partition(" ")[0]
        if name == STEP:
            between = True
        if name not in ("forward", "backward"):
            continue
        if between or found[-1].name != name:
            found.append(Span("pass", name, span.start_ns, span.end_ns))
            between = False
        else:
            found[-1] = found[-1]._replace(end_ns=max(span.end_ns, found[-1].end_ns))
    return found


def step_ends(spans: Iterable[Span]) -> list[int]:
    """The times at which optimizer steps have ended on the device that computes."""
    return sorted(span.end_ns for span in spans if (span.row, span.name) == (COMPUTE, STEP))
