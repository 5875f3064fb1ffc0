"""The file that Perfetto opens: rows, lanes, times, and the way back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.trace.perfetto import write_perfetto
from overspill.trace.spans import ROWS, Span
from tests.trace.reader import read_perfetto

SPANS = [
    Span("upload", "L0.1", 1_000_000, 1_500_000, 17_000_000),
    Span("upload", "L0.2", 1_200_000, 1_700_000, 17_000_000),  # overlaps the one before
    Span("upload", "L0.3", 1_700_000, 1_900_000, 0),
    Span("compute", "wave 0", 1_500_000, 1_800_123),
    Span("cpu experts", "own row", 1_000_500, 1_000_500),
]


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_rows_are_threads_in_order_and_overlaps_get_their_own(tmp_path: Path) -> None:
    write_perfetto(SPANS, tmp_path / "t.json")
    events = events_of(tmp_path / "t.json")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    in_order = [names[tid] for tid in sorted(names, key=order.__getitem__)]
    assert in_order == ["compute", "upload", "upload 2", "cpu experts"]
    row_of = {e["name"]: names[e["tid"]] for e in events if e["ph"] == "X"}
    assert row_of["L0.1"] == "upload"
    assert row_of["L0.2"] == "upload 2"
    assert row_of["L0.3"] == "upload"


def test_times_are_microseconds_from_the_first_span_and_bytes_have_a_speed(tmp_path: Path) -> None:
    write_perfetto(SPANS, tmp_path / "t.json")
    by_name = {e["name"]: e for e in events_of(tmp_path / "t.json") if e["ph"] == "X"}
    assert by_name["L0.1"]["ts"] == 0
    assert by_name["wave 0"]["ts"] == 500
    assert by_name["wave 0"]["dur"] == 300.123
    assert by_name["wave 0"]["args"] == {}
    assert by_name["L0.1"]["args"] == {"bytes": 17_000_000, "GB/s": 34.0}


def test_an_overlap_within_the_clocks_error_stays_on_one_lane(tmp_path: Path) -> None:
    write_perfetto(
        [Span("upload", "a", 0, 100_500), Span("upload", "b", 100_000, 200_000)],
        tmp_path / "t.json",
    )
    a, b = (e for e in events_of(tmp_path / "t.json") if e["ph"] == "X")
    assert a["tid"] == b["tid"]
    assert a["ts"] + a["dur"] <= b["ts"]


@pytest.mark.parametrize("name", ["t.json", "deep/folder/t.json.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    write_perfetto(SPANS, tmp_path / name)
    moved = [s._replace(start_ns=s.start_ns - 10**6, end_ns=s.end_ns - 10**6) for s in SPANS]
    assert sorted(read_perfetto(tmp_path / name)) == sorted(moved)
    assert [file.name for file in (tmp_path / name).parent.iterdir()] == [Path(name).name]


@given(
    st.lists(st.tuples(st.sampled_from(ROWS), st.integers(0, 50), st.integers(0, 50)), max_size=40)
)
def test_spans_of_a_thread_never_overlap(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    # In steps of 1 µs, so that some overlaps are below the clocks' error and some above it.
    spans = [Span(row, "x", 1000 * at, 1000 * (at + length)) for row, at, length in drawn]
    write_perfetto(spans, path)
    shown = [e for e in events_of(path) if e["ph"] == "X"]
    assert len(shown) == len(spans)
    end: dict[int, float] = {}
    for event in shown:
        assert event["dur"] >= 0
        assert event["ts"] >= end.get(event["tid"], 0)
        end[event["tid"]] = event["ts"] + event["dur"]


def test_no_spans_make_an_empty_timeline(tmp_path: Path) -> None:
    write_perfetto([], tmp_path / "t.json")
    assert read_perfetto(tmp_path / "t.json") == []
