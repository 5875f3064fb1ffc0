"""Reads a timeline file back."""

import gzip
import json
from pathlib import Path

from overspill.trace.spans import Span


def read_perfetto(path: Path) -> list[Span]:
    """The spans of a file, sorted by start; the first starts at 0 ns."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    spans = []
    for event in json.loads(data)["traceEvents"]:
        if event["ph"] == "X":
            start_ns = round(event["ts"] * 1000)
            end_ns = start_ns + round(event["dur"] * 1000)
            bytes = event["args"].get("bytes", 0)
            spans.append(Span(event["cat"], event["name"], start_ns, end_ns, bytes))
    return sorted(spans, key=lambda span: (span.start_ns, span.end_ns))
