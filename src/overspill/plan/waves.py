"""Waves: experts that are on the device at the same time compute together."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """An expert of the chunk that is being computed."""

    position: int  # in its layer
    slot: int
    start: int  # its first token row
    rows: int  # token rows routed to it
    issued: bool  # its upload was issued
    arrived: bool  # its upload has ended


def first_of_wave(pending: Sequence[Candidate], lead: int) -> int:
    """Where in `pending`, which is ordered by position, a wave that contains the one at `lead`
    begins: at the first of the neighbours before it that have all arrived."""
    while lead > 0 and pending[lead - 1].arrived and _near(pending[lead - 1], pending[lead]):
        lead -= 1
    return lead


def next_wave(pending: Sequence[Candidate], max_rows: int, waves: bool) -> int:
    """How many of `pending`, from the first on, compute as the next wave; at least one.

    A wave is a run of neighbouring slots. It contains those that have arrived, so that it does not
    wait for the last copy, and at most `max_rows` token rows, which bounds its activations.
    """
    first = pending[0]
    assert first.issued
    count, rows = 1, first.rows
    if not waves:
        return count
    for before, after in itertools.pairwise(pending):
        fits = rows + after.rows <= max_rows
        if not (_near(before, after) and after.issued and after.arrived and fits):
            break
        count += 1
        rows += after.rows
    return count


def _near(before: Candidate, after: Candidate) -> bool:
    """Whether both their slots and their token rows are adjacent: an expert in between that was
    computed already must not be computed again."""
    rows = before.start + before.rows == after.start
    return rows and after.slot - before.slot == after.position - before.position


def row_pieces(start: int, stop: int, max_rows: int) -> list[tuple[int, int]]:
    """Cuts the rows of one expert, where they are more than `max_rows`, into equal pieces."""
    pieces = max(1, -(-(stop - start) // max_rows))
    length = -(-(stop - start) // pieces)
    return [(at, min(at + length, stop)) for at in range(start, stop, max(length, 1))]
