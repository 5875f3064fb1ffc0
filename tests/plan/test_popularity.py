"""The pace of learning, the choice between prediction and history, and the accuracy of experts."""

import itertools
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.popularity import LearningPace, RowErrors, expert_accuracy, rarest


@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 0.2)), min_size=1, max_size=300),
    st.floats(0.001, 0.5),
)
def test_learning_takes_at_most_its_share(passes: list[tuple[float, float]], share: float) -> None:
    """Passes follow each other after some seconds; one that is learned from takes as long as the
    longest so far, or less. Only the first one is not known before."""
    pace, now, spent, longest = LearningPace(share), 0.0, 0.0, 0.0
    for gap, cost in passes:
        now += gap
        if pace.allows(now):
            cost = cost if not longest else min(cost, longest / 2)
            longest = max(longest / 2, cost)
            if spent:
                assert spent + cost <= share * now + 1e-9
            spent += cost
            pace.spent(cost)


def test_idle_time_gives_no_time_to_learn() -> None:
    pace = LearningPace(0.01)
    pace.allows(0.0)
    pace.idle()
    pace.allows(1000.0)
    assert pace.busy == 0
    pace.allows(1000.2)
    assert pace.busy == pytest.approx(0.2)
    pace.allows(2000.0)  # a gap that nothing announced: mostly idle
    assert pace.busy < 6


def test_the_first_learning_is_paid_for_and_later_ones_follow_what_they_take() -> None:
    pace = LearningPace(0.01)
    times = [0.001 * n for n in range(100_000)]
    learned = []
    for now in times:
        if pace.allows(now):
            learned.append(now)
            pace.spent(0.1 if len(learned) == 1 else 1e-4)
    assert learned[0] == pytest.approx(0.1)
    assert learned[1] > 10  # 0.1 s is one percent of that
    assert len(learned) > 1000
    assert pace.seconds <= 0.01 * times[-1]


def test_the_closer_expectation_is_preferred() -> None:
    errors = RowErrors()
    assert not errors.prefers_prediction
    errors.note([4, 0, 2], predicted=[3, 1, 2], history=[2, 2, 2])
    assert errors.prefers_prediction
    for _ in range(30):
        errors.note([4, 0, 2], predicted=[0, 4, 2], history=[4, 0, 2])
    assert not errors.prefers_prediction


def test_expert_accuracy_is_the_mean_over_all_orders_of_equal_rows() -> None:
    draw = random.Random(1)
    for _ in range(30):
        predicted = [draw.randrange(3) for _ in range(4)]
        real = [draw.randrange(3) for _ in range(4)]
        n, m = draw.randrange(1, 4), draw.randrange(1, 4)
        naive = fmean(
            len({*_fewest(predicted, first)[:n]} & {*_fewest(real, second)[:m]}) / n
            for first in itertools.permutations(range(4))
            for second in itertools.permutations(range(4))
        )
        assert expert_accuracy(predicted, real, n, m) == pytest.approx(naive)


def _fewest(rows: list[int], order: tuple[int, ...]) -> list[int]:
    return sorted(order, key=lambda expert: rows[expert])


def test_rare_experts_are_those_of_the_paper() -> None:
    assert rarest(128) == (32, 48)
    assert rarest(8) == (2, 3)
