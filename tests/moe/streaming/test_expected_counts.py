"""What is known of a layer's tokens before its router has spoken, and how well."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.errors import ConfigError
from overspill.core.experts import Phase
from overspill.moe.lookahead import Knowledge, Popularity
from overspill.moe.settings import Settings

F, B = Phase.FORWARD, Phase.BACKWARD
rows = st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=6)


def test_nothing_is_known_before_the_first_pass() -> None:
    popularity = Popularity(2, 3)
    assert popularity.expected(0, F)[0] is None
    assert popularity.expected(1, B)[0] is None


@given(rows)
def test_history_fades_by_half_and_backward_has_the_real_tokens(passes: list[list[int]]) -> None:
    popularity = Popularity(1, 4)
    for counts in passes:
        popularity.observe(0, counts)
    expected = [float(count) for count in passes[0]]
    for counts in passes[1:]:
        expected = [old / 2 + new / 2 for old, new in zip(expected, counts, strict=True)]
    tokens, known = popularity.expected(0, F)
    assert tokens == pytest.approx(expected)
    assert known is Knowledge.HISTORY
    assert popularity.expected(0, B) == (tuple(passes[-1]), Knowledge.REAL)


def test_lists_are_not_shared_with_who_gave_them() -> None:
    popularity, counts = Popularity(1, 2), [3, 4]
    popularity.observe(0, counts)
    popularity.predict(0, counts)
    counts[0] = 99
    assert popularity.expected(0, F)[0] == (3, 4)
    assert popularity.expected(0, B)[0] == (3, 4)


def test_a_prediction_counts_until_its_pass_has_come() -> None:
    popularity = Popularity(1, 2)
    popularity.observe(0, [5, 5])
    popularity.predict(0, [9, 1])
    assert popularity.expected(0, F) == ((9, 1), Knowledge.PREDICTED)
    popularity.observe(0, [9, 1])
    assert popularity.expected(0, F)[1] is Knowledge.HISTORY


def test_a_predictor_that_is_worse_than_history_is_not_listened_to_and_may_come_back() -> None:
    popularity = Popularity(1, 2)
    popularity.observe(0, [8, 2])
    popularity.predict(0, [2, 8])
    popularity.observe(0, [8, 2])
    popularity.predict(0, [2, 8])
    assert popularity.expected(0, F)[1] is Knowledge.HISTORY
    for _ in range(4):  # routing changes every time, and the predictor knows
        for counts in ([1, 9], [9, 1]):
            popularity.predict(0, counts)
            popularity.observe(0, counts)
    popularity.predict(0, [1, 9])
    assert popularity.expected(0, F)[1] is Knowledge.PREDICTED


def test_a_batch_of_another_size_is_compared_by_shares() -> None:
    popularity = Popularity(1, 2)
    popularity.observe(0, [80, 20])
    popularity.predict(0, [1, 9])
    popularity.observe(0, [8, 2])  # history was right, for a tenth of the tokens
    popularity.predict(0, [1, 9])
    assert popularity.expected(0, F)[1] is Knowledge.HISTORY


def test_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="lookahead"):
        Settings(lookahead=-1)
