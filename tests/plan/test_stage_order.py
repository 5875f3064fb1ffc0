"""The order of passes in stages: all micro-batches pass a stage before the next one."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import Phase
from overspill.moe.streaming.step_cursor import StepCursor
from overspill.plan.order import Position, StageVisit, upcoming

F, B = Phase.FORWARD, Phase.BACKWARD


@dataclass(frozen=True)
class Pass:
    """One pass through a layer, and the visit that it is a part of."""

    here: Position
    visit: StageVisit


def passes_of_step(sizes: list[int], micro_batches: int, training: bool = True) -> list[Pass]:
    """All passes of a step through stages of so many layers, as the definition has it. Without
    `training` those of an evaluation."""
    edges = list(pairwise([0, *accumulate(sizes)]))
    found = []

    def go_through(stage: int, micro_batch: int, phases: Iterable[Phase]) -> None:
        first, stop = edges[stage]
        turns = training and stage == len(sizes) - 1
        visit = StageVisit(first, stop, micro_batch, micro_batches, turns)
        for phase in phases:
            layers = range(first, stop) if phase is F else range(stop - 1, first - 1, -1)
            found.extend(Pass(Position(layer, phase), visit) for layer in layers)

    for stage in range(len(sizes)):
        for micro_batch in range(micro_batches):
            turns = training and stage == len(sizes) - 1
            go_through(stage, micro_batch, (F, B) if turns else (F,))
    for stage in range(len(sizes) - 2, -1, -1) if training else ():
        for micro_batch in range(micro_batches):
            go_through(stage, micro_batch, (B,))
    return found


# a stage may have dense blocks alone
SIZES = st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any)


def distinct(positions: Iterable[Position]) -> list[Position]:
    """Each position once, in the order of its first pass."""
    return list(dict.fromkeys(positions))


@given(SIZES, st.integers(1, 4), st.booleans())
def test_the_order_is_the_true_one_from_every_pass_of_a_step(
    sizes: list[int], micro_batches: int, training: bool
) -> None:
    step = passes_of_step(sizes, micro_batches, training)
    n_layers, twice = sum(sizes), [one.here for one in (*step, *step)]
    for number, one in enumerate(step):
        order = list(upcoming(one.here, n_layers, training, one.visit))
        assert order[0] == one.here
        # the forward of the next step included, as far as the order looks
        assert distinct(order[1:]) == distinct(twice[number + 1 :])[: len(distinct(order[1:]))]
        assert {p.layer for p in order if p.phase is F} == set(range(n_layers))


@given(SIZES, st.integers(1, 4))
def test_the_next_direction_of_every_layer_is_the_true_one(
    sizes: list[int], micro_batches: int
) -> None:
    step = passes_of_step(sizes, micro_batches)
    cursor = StepCursor(1, [0] * sum(sizes))
    twice = [one.here for one in (*step, *step)]
    for number, one in enumerate(step):
        cursor.follow_stage(one.visit)
        cursor.enter(one.here.layer, one.here.phase, [1], training=True)
        for layer in range(sum(sizes)):
            true = next(p.phase for p in twice[number:] if p.layer == layer)
            assert cursor.next_phase(layer) is true, (one, layer)


@given(st.integers(1, 5), st.integers(0, 4), st.sampled_from(Phase), st.booleans())
def test_a_pass_outside_of_the_stage_follows_the_order_of_a_whole_model(
    n_layers: int, layer: int, phase: Phase, training: bool
) -> None:
    """An evaluation, or the first pass of a visit that has not begun."""
    here = Position(layer % n_layers, phase)
    visit = StageVisit(n_layers, n_layers + 2, 0, 3, turns=False)
    whole = list(upcoming(here, n_layers, training))
    assert list(upcoming(here, n_layers, training, visit)) == whole
