"""Waves: adjacent experts whose uploads have arrived compute together."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """An expert of the current chunk, or resident, that is to be computed."""

    position: int  # in its layer
    start: int  # its first token row
    rows: int  # token rows routed to it
    issued: bool  # its upload was issued
    arrived: bool  # its upload has ended


def first_of_wave(pending: Sequence[Candidate], lead: int) -> int:
    """The index in `pending` (ordered by position) at which the wave of `lead` starts: the first of
    the adjacent experts before it that have all arrived."""
    while lead > 0 and pending[lead - 1].arrived and _adjacent(pending[lead - 1], pending[lead]):
        lead -= 1
    return lead


def next_wave(pending: Sequence[Candidate], max_rows: int, waves: bool) -> int:
    """The number of experts, the first of `pending`, that form the next wave; at least one.

    A wave is a run of experts with adjacent token rows; their slots are adjacent too. It includes
    only experts that have arrived, so that it does not wait for a later copy, and at most
    `max_rows` token rows, to bound its activations.
    """
    first = pending[0]
    assert first.issued
    count, rows = 1, first.rows
    if not waves:
        return count
    for before, after in itertools.pairwise(pending):
        fits = rows + after.rows <= max_rows
        if not (_adjacent(before, after) and after.issued and after.arrived and fits):
            break
        count += 1
        rows += after.rows
    return count


def _adjacent(before: Candidate, after: Candidate) -> bool:
    """Whether token rows are adjacent. Token rows in between belong to an expert that was already
    computed."""
    return before.start + before.rows == after.start


def row_pieces(start: int, stop: int, max_rows: int) -> list[tuple[int, int]]:
    """Divide the token rows of one expert into equal pieces of at most `max_rows`."""
    pieces = max(1, -(-(stop - start) // max_rows))
    length = -(-(stop - start) // pieces)
    return [(at, min(at + length, stop)) for at in range(start, stop, max(length, 1))]
