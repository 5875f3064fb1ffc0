"""Where the step is: what is needed next comes first, and real tokens are counted once."""

from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import Phase
from overspill.moe.course import Course
from overspill.plan.banks import Chunk

F, B = Phase.FORWARD, Phase.BACKWARD


def ids(course: Course, with_states: bool = True) -> list[tuple[int, int]]:
    return [tuple(expert) for expert, _ in course.experts(with_states)]


@st.composite
def courses(draw: st.DrawFn) -> Course:
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    counts = st.lists(st.integers(0, 3), min_size=experts, max_size=experts)
    course = Course(layers, experts)
    for _ in range(draw(st.integers(1, 5))):
        layer = draw(st.integers(0, layers - 1))
        course.enter(layer, draw(st.sampled_from(Phase)), draw(counts), draw(st.booleans()))
    course.leave(draw(st.lists(st.integers(0, experts - 1), max_size=experts)))
    return course


@given(courses(), st.booleans())
def test_what_the_pass_still_waits_for_comes_before_all_else(
    course: Course, with_states: bool
) -> None:
    """With a single host row, anything else in front would be waited for in vain."""
    layer = course.here.layer
    waiting = [
        (layer, index)
        for index in range(course.n_experts)
        if course._counts[index] and index not in course._passed
    ]
    assert ids(course, with_states)[: len(waiting)] == waiting


@given(courses())
def test_states_are_needed_in_backward_by_every_expert_and_else_by_none(course: Course) -> None:
    assert not any(states for _, states in course.experts(with_states=False))
    with_states = {expert.layer for expert, states in course.experts(True) if states}
    for expert, states in course.experts(True):
        assert states or expert.index in course.busy(expert.layer), (
            "weights alone are for experts with tokens"
        )
    if course.here.phase is B:
        assert with_states <= set(range(course.here.layer + 1))
    elif not course.training:
        assert not with_states


def test_the_tokens_of_the_pass_count_here_and_those_of_the_last_forward_elsewhere() -> None:
    course = Course(2, 3)
    course.enter(0, F, [1, 0, 2], training=True)
    course.enter(1, F, [0, 5, 0], training=True)
    # the backward of an earlier micro-batch: other tokens than the last forward
    course.enter(1, B, [1, 1, 0], training=True)
    assert course.busy(1) == [0, 1]
    assert course.busy(0) == [0, 2]


def test_only_training_counts_towards_a_step_and_the_next_begins_at_zero() -> None:
    course, counts = Course(1, 2), [3, 4]
    course.enter(0, F, counts, training=True)
    course.enter(0, F, [5, 5], training=False)  # an evaluation between
    course.enter(0, B, counts, training=True)
    course.enter(0, F, counts, training=True)
    assert course.step_tokens == [[6, 8]]
    of_the_step = course.step_tokens
    course.end_step()
    assert course.step_tokens == [[0, 0]]
    assert of_the_step == [[6, 8]], "who keeps the history keeps it"
    assert counts == [3, 4]


def test_chunks_go_up_down_and_on_to_the_next_step() -> None:
    course = Course(2, 4)
    course.enter(0, F, [1] * 4, training=True)
    # from part 1 of layer 0: the rest of the forward, then the backward
    chunks = [f"{chunk.layer}.{chunk.part}" for chunk in course.chunks(1, 2, ahead=True)]
    assert chunks[:7] == ["0.1", "1.0", "1.1", "1.0", "1.1", "0.0", "0.1"]
    assert list(course.chunks(1, 2, ahead=False)) == [Chunk(0, 1)]


def test_an_evaluation_expects_no_backward() -> None:
    course = Course(2, 1)
    course.enter(1, F, [1], training=False)
    assert ids(course) == [(1, 0), (0, 0), (1, 0)]
