"""Writes a timeline for ui.perfetto.dev (Chrome's trace-event JSON)."""

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from overspill.trace.spans import Span, assign_lanes, rows_in_order

_PROCESS = 1
# GPU events are exact to about half a microsecond, so consecutive copies on one stream may seem to
# overlap by that. They stay on one lane, and the first ends where the second starts.
_CLOCK_ERROR_NS = 2_000


def write_perfetto(spans: Iterable[Span], path: str | Path) -> None:
    """Writes `spans` with times relative to the first; gzipped if `path` ends with .gz."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        with gzip.open(temporary, "wt") if path.suffix == ".gz" else open(temporary, "w") as file:
            # one event per line, so that a long timeline is never in memory as a whole
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(_events(list(spans))):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
        os.replace(temporary, path)  # never leaves a partial file
    finally:
        temporary.unlink(missing_ok=True)


def _events(spans: list[Span]) -> Iterator[dict[str, Any]]:
    placed = assign_lanes(spans, slack_ns=_CLOCK_ERROR_NS)
    origin_ns = min((span.start_ns for span in spans), default=0)
    # The viewer nests overlapping events of a thread, so each lane of a row is a separate thread.
    lanes: dict[str, int] = {}
    for span, lane in placed:
        lanes[span.row] = max(lanes.get(span.row, 0), lane + 1)
    threads: dict[tuple[str, int], int] = {}
    yield _metadata("process_name", 0, {"name": "overspill"})
    for row in rows_in_order(spans):
        for lane in range(lanes[row]):
            thread = threads[row, lane] = len(threads) + 1
            yield _metadata("thread_name", thread, {"name": f"{row} {lane + 1}" if lane else row})
            yield _metadata("thread_sort_index", thread, {"sort_index": thread})
    next_start_ns: dict[tuple[str, int], int] = {}
    shown = []
    for span, lane in reversed(placed):
        end_ns = min(span.end_ns, next_start_ns.get((span.row, lane), span.end_ns))
        next_start_ns[span.row, lane] = span.start_ns
        shown.append((span, lane, end_ns - span.start_ns))
    for span, lane, length_ns in reversed(shown):
        args: dict[str, Any] = {}
        if span.bytes:
            args["bytes"] = span.bytes
            if length_ns > 0:
                args["GB/s"] = round(span.bytes / length_ns, 3)
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": threads[span.row, lane],
            "cat": span.row,
            "name": span.name,
            "ts": (span.start_ns - origin_ns) / 1000,
            "dur": length_ns / 1000,
            "args": args,
        }


def _metadata(name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": name, "args": args}
