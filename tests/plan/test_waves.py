"""Waves are runs of adjacent experts that have arrived; row pieces cover an expert's token rows."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.waves import Candidate, first_of_wave, next_wave, row_pieces


@st.composite
def pending(draw: st.DrawFn) -> list[Candidate]:
    positions = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=8)))
    candidates: list[Candidate] = []
    start = 0
    for position in positions:
        issued = draw(st.booleans()) or not candidates
        start += draw(st.sampled_from([0, 0, 0, 7]))  # an expert in between was computed
        rows = draw(st.integers(1, 50))
        candidates.append(
            Candidate(
                position=position,
                start=start,
                rows=rows,
                issued=issued,
                arrived=issued and draw(st.booleans()),
            )
        )
        start += rows
    return candidates


@given(pending(), st.integers(1, 200), st.booleans())
def test_a_wave_is_a_run_of_adjacent_experts_that_have_arrived(
    candidates: list[Candidate], max_rows: int, waves: bool
) -> None:
    count = next_wave(candidates, max_rows, waves)
    assert 1 <= count <= len(candidates)
    wave = candidates[:count]
    for candidate in wave[1:]:
        assert waves
        assert candidate.arrived
    for before, after in itertools.pairwise(wave):
        assert before.start + before.rows == after.start, "no expert is computed twice"
    assert count == 1 or sum(candidate.rows for candidate in wave) <= max_rows


@given(pending(), st.integers(1, 200))
def test_a_wave_is_as_long_as_possible(candidates: list[Candidate], max_rows: int) -> None:
    count = next_wave(candidates, max_rows, waves=True)
    if count < len(candidates):
        last, after = candidates[count - 1], candidates[count]
        near = last.start + last.rows == after.start
        rows = sum(candidate.rows for candidate in candidates[: count + 1])
        assert not (near and after.arrived and rows <= max_rows)


def test_an_expert_without_tokens_does_not_end_a_wave() -> None:
    candidates = [
        Candidate(position, 3 * number, 3, True, True) for number, position in enumerate((0, 2, 3))
    ]
    assert next_wave(candidates, max_rows=100, waves=True) == 3


@given(pending(), st.data())
def test_a_wave_starts_at_the_first_adjacent_expert_that_has_arrived(
    candidates: list[Candidate], data: st.DataObject
) -> None:
    issued = [number for number, candidate in enumerate(candidates) if candidate.issued]
    lead = data.draw(st.sampled_from(issued))
    first = first_of_wave(candidates, lead)
    assert first <= lead
    assert candidates[first].issued
    assert next_wave(candidates[first:], max_rows=10**6, waves=True) > lead - first or not all(
        candidate.arrived for candidate in candidates[first : lead + 1]
    )


@given(st.integers(0, 1000), st.integers(0, 500), st.integers(1, 300))
def test_row_pieces_cover_all_rows_once_and_evenly(start: int, rows: int, max_rows: int) -> None:
    pieces = row_pieces(start, start + rows, max_rows)
    covered = [row for first, end in pieces for row in range(first, end)]
    assert covered == list(range(start, start + rows))
    lengths = [end - first for first, end in pieces]
    assert all(0 < length <= max_rows for length in lengths)
    assert len(pieces) == -(-rows // max_rows)
