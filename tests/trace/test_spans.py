"""Unions, lanes and the order of rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.trace.recorder import Recorder
from overspill.trace.spans import (
    ROWS,
    Span,
    assign_lanes,
    busy_shares,
    passes,
    rows_in_order,
    step_ends,
)

times = st.integers(0, 60)
random_spans = st.lists(
    st.builds(
        lambda row, start, length: Span(row, "x", start, start + length),
        st.sampled_from(["upload", "main", "my own row"]),
        times,
        st.integers(0, 20),
    ),
    max_size=30,
)


def test_busy_counts_overlaps_once_and_clips_to_the_window() -> None:
    spans = [
        Span("upload", "a", 0, 40),
        Span("upload", "b", 10, 20),  # inside a
        Span("upload", "c", 30, 50),  # runs on after a
        Span("upload", "d", 90, 130),  # half of it after the end
        Span("optimizer", "e", -50, 10),
    ]
    busy = busy_shares(spans, 0, 100)
    assert busy["upload"] == pytest.approx(0.6)
    assert busy["optimizer"] == pytest.approx(0.1)
    assert busy["ssd write"] == 0.0
    assert list(busy) == list(ROWS)


def test_an_empty_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="must come after"):
        busy_shares([], 5, 5)


@given(random_spans, times, st.integers(1, 60))
def test_busy_is_the_number_of_covered_ticks(spans: list[Span], since: int, length: int) -> None:
    until = since + length
    busy = busy_shares(spans, since, until)
    for row in busy:
        ticks = {tick for s in spans if s.row == row for tick in range(s.start_ns, s.end_ns)}
        covered = len(ticks.intersection(range(since, until)))
        assert busy[row] == pytest.approx(covered / length)


@given(random_spans, st.integers(0, 3))
def test_no_two_spans_of_a_lane_overlap_and_no_span_is_lost(spans: list[Span], slack: int) -> None:
    placed = assign_lanes(spans, slack)
    assert sorted(span for span, _ in placed) == sorted(spans)
    last_end: dict[tuple[str, int], int] = {}
    for span, lane in placed:
        assert last_end.get((span.row, lane), 0) <= span.start_ns + slack
        last_end[span.row, lane] = span.end_ns


def test_spans_one_after_the_other_need_one_lane() -> None:
    spans = [Span("upload", "x", 10 * n, 10 * n + 10) for n in range(5)]
    assert [lane for _, lane in assign_lanes(spans)] == [0] * 5


def test_rows_come_in_the_order_of_the_timeline() -> None:
    spans = [Span(row, "x", 0, 1) for row in ("zebra", "main", "upload", "antelope")]
    assert rows_in_order(spans) == ["upload", "main", "antelope", "zebra"]


def test_passes_go_from_the_first_wave_to_the_last_one() -> None:
    names = ("forward 0.0-3", "dense", "forward 1.0-7", "dense", "backward 1.0-7", "backward 0.0-7")
    spans = [Span("compute", name, 10 * at, 10 * at + 9) for at, name in enumerate(names)]
    other = Span("upload", "forward is no pass here", 0, 1000)
    assert passes([*reversed(spans), other]) == [
        Span("pass", "forward", 0, 29),
        Span("pass", "backward", 40, 59),
    ]


def test_a_step_ends_a_pass_also_if_the_next_one_is_of_the_same_kind() -> None:
    spans = [Span("compute", name, at, at + 1) for at, name in enumerate(("forward 0.0", "step"))]
    again = Span("compute", "forward 0.0", 5, 6)
    assert len(passes([*spans, again])) == 2
    assert step_ends([*spans, again]) == [2]


def test_a_mark_follows_what_was_recorded_before() -> None:
    recorder = Recorder()
    recorder.mark("step")  # off: no mark
    recorder.start()
    with recorder.span("compute", "backward 0.0-1"):
        pass
    recorder.mark("step")
    recorder.stop()
    (end,) = step_ends(recorder.spans())
    assert end >= passes(recorder.spans())[0].end_ns
