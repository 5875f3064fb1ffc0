"""Expected token rows: by history before a forward, by routing before a backward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import Phase
from overspill.moe.streaming.expected_counts import CountSource, ExpectedCounts

F, B = Phase.FORWARD, Phase.BACKWARD
passes = st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=6)


def test_nothing_is_expected_before_the_first_pass() -> None:
    counts = ExpectedCounts(2)
    assert counts.expected(0, F)[0] is None
    assert counts.expected(1, B)[0] is None


@given(passes)
def test_history_decays_by_half_and_backward_has_the_routing(passes: list[list[int]]) -> None:
    counts = ExpectedCounts(1)
    for observed in passes:
        counts.observe(0, observed)
    expected = [float(count) for count in passes[0]]
    for observed in passes[1:]:
        expected = [old / 2 + new / 2 for old, new in zip(expected, observed, strict=True)]
    history, source = counts.expected(0, F)
    assert history == pytest.approx(expected)
    assert source is CountSource.HISTORY
    assert counts.expected(0, B) == (tuple(passes[-1]), CountSource.ROUTING)


def test_the_observed_list_is_copied() -> None:
    counts, observed = ExpectedCounts(1), [3, 4]
    counts.observe(0, observed)
    observed[0] = 99
    assert counts.expected(0, F)[0] == (3, 4)
    assert counts.expected(0, B)[0] == (3, 4)
