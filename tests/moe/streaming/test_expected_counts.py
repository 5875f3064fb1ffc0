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


def test_a_prediction_is_expected_where_it_was_closer_than_history() -> None:
    counts = ExpectedCounts(1)
    counts.observe(0, [4, 0])
    counts.predict(0, [0, 4])
    assert counts.expected(0, F)[1] is CountSource.HISTORY, "not compared yet"
    assert counts.expected(0, B) == ((4, 0), CountSource.ROUTING)
    counts.observe(0, [0, 4])
    assert counts.expected(0, F) == ((2, 2), CountSource.HISTORY), "nothing is predicted yet"
    counts.predict(0, [3, 1])
    assert counts.expected(0, F) == ((3, 1), CountSource.PREDICTION)
    counts.hint(0, [1, 3])
    assert counts.expected(0, F) == ((1, 3), CountSource.ROUTING), "a pre-gate knows"
    counts.forget_hints()
    assert counts.expected(0, F)[1] is CountSource.HISTORY


def test_a_prediction_is_left_out_where_history_is_closer_and_tried_again() -> None:
    counts, asked = ExpectedCounts(1), 0
    for _ in range(400):
        if counts.wants_prediction(0):
            asked += 1
            counts.predict(0, [0, 8])
            assert counts.expected(0, F)[1] is not CountSource.PREDICTION
        counts.observe(0, [8, 0])
    assert asked == pytest.approx(400 / 8, abs=5)
    for _ in range(400):  # another distribution in each pass, which only a prediction follows
        for now in ([8, 0], [0, 8]):
            if counts.wants_prediction(0):
                counts.predict(0, now)
            counts.observe(0, now)
    counts.predict(0, [8, 0])
    assert counts.expected(0, F)[1] is CountSource.PREDICTION


def test_a_prediction_follows_experts_that_are_swapped() -> None:
    counts = ExpectedCounts(1)
    for predicted in ([1, 2, 3], [3, 2, 1]):
        counts.predict(0, predicted)
        counts.observe(0, [3, 2, 1])
    counts.predict(0, [3, 2, 1])
    counts.swap(0, 0, 1)
    assert counts.expected(0, F) == ((2, 3, 1), CountSource.PREDICTION)
