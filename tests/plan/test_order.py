"""The order of a step: forward, backward, then the next forward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import Phase
from overspill.plan.order import Position, upcoming

F, B = Phase.FORWARD, Phase.BACKWARD


def walk(here: Position, n_layers: int, training: bool) -> list[tuple[int, Phase]]:
    return [(position.layer, position.phase) for position in upcoming(here, n_layers, training)]


@pytest.mark.parametrize(
    ("here", "training", "order"),
    [
        (Position(0, F), True, "0F 1F 2F 2B 1B 0B 0F 1F 2F"),
        (Position(2, F), True, "2F 2B 1B 0B 0F 1F 2F"),
        (Position(1, B), True, "1B 0B 0F 1F 2F"),
        (Position(0, B), True, "0B 0F 1F 2F"),
        (Position(1, F), False, "1F 2F 0F 1F 2F"),
        (Position(1, B), False, "1B 0B 0F 1F 2F"),
    ],
)
def test_upcoming_positions(here: Position, training: bool, order: str) -> None:
    expected = [(int(step[0]), F if step[1] == "F" else B) for step in order.split()]
    assert walk(here, 3, training) == expected


@given(st.integers(1, 8), st.data())
def test_the_rest_of_the_order_is_the_order_from_the_next_position(
    n_layers: int, data: st.DataObject
) -> None:
    layer = data.draw(st.integers(0, n_layers - 1))
    here = Position(layer, data.draw(st.sampled_from(Phase)))
    order = walk(here, n_layers, training=True)
    assert order[0] == (here.layer, here.phase)
    if len(order) > n_layers + 1:
        following = Position(*order[1])
        assert order[1:] == walk(following, n_layers, training=True)
    # every layer is visited again before the order ends
    assert {layer for layer, phase in order if phase is F} == set(range(n_layers))
