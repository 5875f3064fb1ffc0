"""Where the step is: what is needed next comes first."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import Phase
from overspill.moe.streaming.expected_counts import CountSource
from overspill.moe.streaming.step_cursor import StepCursor
from overspill.plan.banks import Chunk

F, B = Phase.FORWARD, Phase.BACKWARD


class Case(NamedTuple):
    """A cursor in the middle of a pass."""

    cursor: StepCursor
    counts: list[int]  # token rows of the current pass
    finished: list[int]  # experts that the pass is done with
    training: bool  # of the last forward


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rows = st.lists(st.integers(0, 3), min_size=experts, max_size=experts)
    cursor, training = StepCursor(experts, [0] * layers), True
    for _ in range(draw(st.integers(1, 5))):
        layer, phase, trains = draw(st.integers(0, layers - 1)), draw(st.sampled_from(Phase)), True
        if phase is F:
            trains = training = draw(st.booleans())
        counts = draw(rows)
        cursor.enter(layer, phase, counts, trains)
    finished = draw(st.lists(st.integers(0, experts - 1), max_size=experts))
    cursor.finish(finished)
    return Case(cursor, counts, finished, training)


def needed(cursor: StepCursor, with_states: bool = True) -> list[tuple[int, int]]:
    return [(layer, expert) for layer, expert, _ in cursor.needed(with_states)]


@given(cases(), st.booleans())
def test_experts_that_the_pass_still_needs_come_first(case: Case, with_states: bool) -> None:
    """With a single host slot the pass would wait forever for an expert behind another."""
    layer = case.cursor.here.layer
    waiting = [
        (layer, expert)
        for expert, count in enumerate(case.counts)
        if count and expert not in case.finished
    ]
    assert needed(case.cursor, with_states)[: len(waiting)] == waiting


@given(cases())
def test_states_are_needed_in_backward_by_every_expert_and_else_by_none(case: Case) -> None:
    cursor = case.cursor
    assert not any(states for _, _, states in cursor.needed(with_states=False))
    with_states = {layer for layer, _, states in cursor.needed(True) if states}
    for layer, expert, states in cursor.needed(True):
        assert states or expert in cursor.busy(layer), "weights alone: only experts with tokens"
    if cursor.here.phase is B:
        assert with_states <= set(range(cursor.here.layer + 1))
    elif not case.training:
        assert not with_states


def test_counts_of_the_current_pass_hold_here_and_those_of_the_last_forward_elsewhere() -> None:
    cursor = StepCursor(3, [0, 0])
    cursor.enter(0, F, [1, 0, 2], training=True)
    cursor.enter(1, F, [0, 5, 0], training=True)
    # the backward of an earlier micro-batch: other tokens than the last forward
    cursor.enter(1, B, [1, 1, 0], training=True)
    assert cursor.busy(1) == [0, 1]
    assert cursor.busy(0) == [0, 2]
    assert cursor.expected(0) == ((1, 0, 2), CountSource.ROUTING)


def test_before_its_first_pass_every_expert_of_a_layer_may_be_busy() -> None:
    assert StepCursor(3, [0, 0]).busy(1) == [0, 1, 2]


def test_the_next_pass_of_a_layer_is_known() -> None:
    cursor = StepCursor(1, [0] * 3)
    cursor.enter(1, F, [1], training=True)
    assert [cursor.next_phase(layer) for layer in range(3)] == [B, F, F]
    cursor.enter(1, B, [1], training=True)
    assert [cursor.next_phase(layer) for layer in range(3)] == [B, B, F]
    cursor.enter(1, F, [1], training=False)
    assert [cursor.next_phase(layer) for layer in range(3)] == [F, F, F]


def test_chunks_go_up_down_and_on_to_the_next_step() -> None:
    cursor = StepCursor(4, [0, 0])
    cursor.enter(0, F, [1] * 4, training=True)
    # from part 1 of layer 0: the rest of the forward, then the backward
    chunks = [f"{chunk.layer}.{chunk.part}" for chunk in cursor.chunks(1, 2, ahead=True)]
    assert chunks[:7] == ["0.1", "1.0", "1.1", "1.0", "1.1", "0.0", "0.1"]
    assert list(cursor.chunks(1, 2, ahead=False)) == [Chunk(0, 1)]


def test_an_evaluation_expects_no_backward() -> None:
    cursor = StepCursor(1, [0, 0])
    cursor.enter(1, F, [1], training=False)
    assert needed(cursor) == [(1, 0), (0, 0), (1, 0)]
