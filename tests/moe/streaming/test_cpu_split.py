"""Which experts of a pass the CPU computes: by expected and measured costs, never by chance."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pytest
import torch

from overspill.core.experts import ExpertShape, Phase
from overspill.hardware.profile import Curve, ExpertCosts
from overspill.moe.settings import CpuPolicy
from overspill.moe.streaming.cpu_split import CpuSplit, OnDevice, RowLimits
from overspill.moe.streaming.step_cursor import StepCursor
from tests.moe.streaming.policies import all_on_cpu

F, B = Phase.FORWARD, Phase.BACKWARD
N = 16
EIGHT = [8] * N
NONE: frozenset[int] = frozenset()
COSTS = ExpertCosts(
    shape=ExpertShape(8, 8, gated=False),
    dtype="bfloat16",
    threads=1,
    load=0.34e-3,
    load_beside=0.36e-3,
    cpu_forward=Curve((1, 64), (0.5e-3, 0.6e-3)),
    cpu_backward=Curve((1, 64), (0.5e-3, 0.6e-3)),
    cpu_training=Curve((1, 64), (0.8e-3, 1e-3)),
    cpu_beside=1.2,
    gpu_forward=Curve((1, 1024), (0.02e-3, 0.2e-3)),
    gpu_backward=Curve((1, 1024), (0.04e-3, 0.4e-3)),
    gpu_training=Curve((1, 1024), (0.06e-3, 0.6e-3)),
    round_trip=0.1e-3,
)
MEASURED = COSTS.cpu_beside * COSTS.cpu_forward(8)
"""Seconds of one expert with 8 token rows on the CPU."""


@dataclass
class Owing:
    """An optimizer that needs the cores for some seconds of each pass."""

    limits: RowLimits | None = None
    owed: float = 0.0

    def row_limits(self) -> RowLimits | None:
        return self.limits

    def seconds(self, layer: int, phase: Phase, need_dw: bool) -> float:
        return self.owed


class Split:
    """A `CpuSplit` of a model with two layers of 16 experts, and the cursor of its passes."""

    def __init__(
        self,
        uploaded: Collection[int] = (),
        resident: Collection[int] = (),
        max_rows: int = 4096,
        max_rows_per_expert: int = 512,
        unreadable: Collection[int] = (),
        policy: CpuPolicy | None = None,
        optimizer: Owing | None = None,
        passes: int = 1,
    ) -> None:
        self.cursor = StepCursor(N, [0, 0])
        self.own = CpuSplit(
            self.cursor,
            None if policy else COSTS,
            max_rows,
            lambda phase: max_rows_per_expert,
            lambda layer: OnDevice(set(resident), set(uploaded), passes),
            lambda layer, position: position not in unreadable,
            policy,
            optimizer,
        )

    def enter(
        self,
        layer: int = 0,
        counts: Sequence[int] = EIGHT,
        phase: Phase = F,
        before: frozenset[int] = NONE,
        allowed: bool = True,
        training: bool = False,
        need_dw: bool = False,
    ) -> frozenset[int]:
        """Begins a pass as the engine does; returns the CPU's experts."""
        self.own.enter(layer, allowed, trained=need_dw)
        self.own.likely(layer)
        self.cursor.enter(layer, phase, counts, training)
        return self.own.decide(layer, counts, phase, before, need_dw)


# -- the decision -----------------------------------------------------------------------------


def test_both_sides_get_experts() -> None:
    assert 0 < len(Split().enter()) < N


def test_busy_experts_go_to_the_device() -> None:
    chosen = Split().enter(counts=[400, 300, *[8] * 14])
    assert chosen
    assert chosen <= set(range(2, N))


def test_resident_experts_stay_on_the_device() -> None:
    assert Split(resident=range(8)).enter() <= set(range(8, N))
    assert Split(resident=range(N)).enter() == NONE


def test_the_cpu_keeps_its_experts_when_all_others_were_uploaded_ahead() -> None:
    """The link continues with the next layer: dividing the rest again would leave the CPU with less
    and less."""
    chosen = Split().enter()
    assert Split(uploaded=set(range(N)) - chosen).enter() == chosen


@pytest.mark.parametrize("policy", [None, all_on_cpu])
def test_unreadable_experts_go_to_the_device(policy: CpuPolicy | None) -> None:
    chosen = Split(policy=policy).enter()
    missing = set(sorted(chosen)[:2])
    assert Split(policy=policy, unreadable=missing).enter() == chosen - missing


@pytest.mark.parametrize("policy", [None, all_on_cpu])
def test_the_cpu_gets_no_expert_with_more_rows_than_its_kernel_takes(
    policy: CpuPolicy | None,
) -> None:
    counts = [9 if position < 12 else 3 for position in range(N)]
    chosen = Split(max_rows_per_expert=8, policy=policy).enter(counts=counts)
    assert chosen
    assert chosen <= set(range(12, N))


@pytest.mark.parametrize("policy", [None, all_on_cpu])
@pytest.mark.parametrize("max_rows", [0, 7, 8, 20])
def test_the_cpu_gets_no_more_rows_than_the_buffers_hold(
    max_rows: int, policy: CpuPolicy | None
) -> None:
    assert 8 * len(Split(max_rows=max_rows, policy=policy).enter()) <= max_rows


def test_a_policy_chooses_among_experts_with_tokens() -> None:
    assert Split(policy=all_on_cpu).enter(counts=[0, 1] * 8) == set(range(1, N, 2))


def test_backward_keeps_the_forward_split_unless_another_is_clearly_better() -> None:
    split = Split()
    number = len(split.enter(training=True))
    others = frozenset(range(N - number, N))  # not the ones that a new split would choose
    assert split.enter(phase=B, before=others, training=True) == others
    assert split.enter(phase=B, before=frozenset(range(N)), training=True) != frozenset(range(N))


def test_backward_does_not_keep_experts_that_were_uploaded() -> None:
    split = Split(uploaded={15})
    before = split.enter(training=True)
    again = split.enter(phase=B, before=before - {min(before)} | {15}, training=True)
    assert again
    assert 15 not in again


def test_backward_does_not_keep_a_split_where_none_is_better() -> None:
    split = Split()
    before = split.enter(training=True)
    for _ in range(50):
        split.own.note_gap(B, 20e-3)
    assert split.enter(phase=B, before=before, training=True) == NONE


def test_nothing_is_split_where_it_is_not_allowed_or_off_or_deterministic() -> None:
    split = Split()
    assert split.enter()
    assert split.enter(allowed=False) == NONE
    torch.use_deterministic_algorithms(True)
    try:
        assert split.enter() == NONE
    finally:
        torch.use_deterministic_algorithms(False)
    split.own.set_enabled(False)
    assert split.enter() == NONE
    split.own.set_enabled(True)
    assert split.enter()


# -- before the routing is known --------------------------------------------------------------


def test_a_split_is_expected_if_the_last_passes_had_one() -> None:
    split = Split()
    split.own.enter(0, True)
    assert split.own.likely(0), "nothing is known yet"
    split.enter(counts=[4000] * N)
    split.enter(layer=1)
    assert not split.own.likely(0)
    assert split.own.likely(1)
    split.own.enter(1, False)
    assert not split.own.likely(1)


def test_history_says_what_to_upload_ahead_busiest_first() -> None:
    split, counts = Split(), [2] * N
    counts[9], counts[4] = 500, 400
    split.enter(layer=1, counts=counts)
    split.enter(layer=0)
    ahead = split.own.uploads(1, range(N))
    assert ahead[:2] == [9, 4]
    assert 2 < len(ahead) < N
    assert split.own.uploads(1, range(8))[0] == 4


def test_the_current_layer_uploads_what_the_cpu_does_not_compute() -> None:
    split = Split()
    chosen = split.enter(counts=[0, *[8] * 15])
    assert sorted(split.own.uploads(0, range(N))) == sorted(set(range(1, N)) - chosen)


def test_backward_uploads_no_expert_of_the_forward_split() -> None:
    split = Split()
    chosen = split.enter(layer=0, training=True)
    split.enter(layer=1, training=True)
    assert chosen.isdisjoint(split.own.uploads(0, range(N)))


@pytest.mark.parametrize("trained", [0, 1])
def test_layers_without_cpu_experts_are_uploaded_whole_beside_layers_with_them(
    trained: int,
) -> None:
    split, frozen = Split(), 1 - trained
    for layer in (0, 1):
        split.enter(layer, allowed=layer != trained, training=True)
    for here in (0, 1):
        split.enter(here, allowed=here != trained, training=True)
        assert split.own.uploads(trained, range(N)) == list(range(N))
        assert split.own.uploads_all(trained)
        assert len(split.own.uploads(frozen, range(N))) < N
        assert not split.own.uploads_all(frozen)


def test_all_experts_are_certainly_uploaded_only_if_all_had_tokens_and_none_is_the_cpus() -> None:
    split = Split()
    assert not split.own.uploads_all(1), "nothing is known"
    split.enter(1, allowed=False)
    split.enter(0)
    assert split.own.uploads_all(1)
    split.enter(1)
    split.enter(0)
    assert not split.own.uploads_all(1)
    for _ in range(4):
        split.enter(1, counts=[0, *[8] * 15], allowed=False)
    split.enter(0)
    assert not split.own.uploads_all(1), "expert 0 may be idle"


def test_few_rows_are_computed_as_one_wave() -> None:
    split = Split()
    assert split.own.is_small([1] * N, F)
    assert split.own.is_small(EIGHT, B)
    assert not split.own.is_small([1000, 1000, *[0] * 14], F)
    assert not Split(policy=all_on_cpu).own.is_small([1] * N, F), "nothing was measured"


def test_an_upload_that_serves_several_passes_is_worth_more() -> None:
    """In a stage, for the micro-batches that follow."""
    once, twice, often = (Split(passes=passes).enter() for passes in (1, 2, 64))
    assert len(once) > len(twice) > len(often) == 0


# -- weight gradients ---------------------------------------------------------------------------


def test_weight_gradients_leave_the_cpu_with_fewer_experts() -> None:
    frozen, trained = (Split().enter(phase=B, need_dw=need_dw) for need_dw in (False, True))
    assert 0 < len(trained) < len(frozen)


def test_their_pace_is_learnt_apart_from_that_of_frozen_experts() -> None:
    split = Split()
    alone = split.enter(phase=B)
    for _ in range(50):
        split.own.note_job(B, [8] * 3, 1.0, need_dw=True)
    assert split.enter(phase=B, need_dw=True) == NONE
    assert split.enter(phase=B) == alone


def test_updates_that_the_cores_owe_count() -> None:
    """For layers that are trained, in both directions."""
    few = len(Split(optimizer=Owing()).enter(phase=B, need_dw=True))
    owing = Owing(owed=1e-3)
    assert 0 < len(Split(optimizer=owing).enter(phase=B, need_dw=True)) < few
    owing.owed = 10e-3
    assert Split(optimizer=owing).enter(phase=F, need_dw=True) == NONE
    assert Split(optimizer=owing).enter(phase=B) == Split().enter(phase=B), "nothing is trained"


@pytest.mark.parametrize("policy", [None, all_on_cpu])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_cpu_forms_no_more_gradients_than_there_is_memory_for(
    most: int, policy: CpuPolicy | None
) -> None:
    split = Split(policy=policy, optimizer=Owing(RowLimits(8, 8 * most)))
    before = split.enter(training=True)
    assert len(before) > most, "a forward forms none"
    chosen = split.enter(phase=B, before=before, need_dw=True, training=True)
    assert len(chosen) == most if policy else len(chosen) <= most


# -- what is learnt from measurements -----------------------------------------------------------


def passes_until_split(split: Split) -> int:
    passes = 0
    while not split.enter():
        passes += 1
        assert passes < 1000
    return passes


def test_time_between_layers_leaves_the_cpu_with_fewer_experts() -> None:
    split = Split()
    alone = split.enter()
    for _ in range(50):
        split.own.note_gap(F, 2e-3)
    assert 0 < len(split.enter()) < len(alone)
    assert split.enter(phase=B) == alone, "each direction has its own"
    for _ in range(50):
        split.own.note_gap(F, 20e-3)
    assert split.enter() == NONE


def test_a_gap_that_leaves_the_cpu_idle_is_forgotten_in_time() -> None:
    """It is not measured while the CPU gets nothing."""
    split = Split()
    split.own.note_gap(F, 5.0)
    assert split.enter(), "a single one is not trusted"
    for _ in range(50):
        split.own.note_gap(F, 5.0)
    assert 20 < passes_until_split(split) < 500


def test_slow_cores_get_fewer_experts_and_are_tried_again() -> None:
    split = Split()
    alone = split.enter()
    for _ in range(50):
        split.own.note_job(F, [8] * 3, 3 * MEASURED)
    assert split.enter() == alone, "as it was measured"
    for _ in range(50):
        split.own.note_job(F, [8] * 3, 1.5 * 3 * MEASURED)
    assert 0 < len(split.enter()) < len(alone)
    for _ in range(50):
        split.own.note_job(F, [8] * 3, 1.0)
    assert passes_until_split(split) > 20


def test_the_shortest_recent_handover_counts() -> None:
    split, counts = Split(), [1, 1, *[0] * 14]  # the CPU saves one upload, if its handover is short
    assert split.enter(counts=counts) == NONE
    split.own.note_handover(1e-6)
    for _ in range(20):  # where the device ends last, it includes waiting for the device
        assert split.enter(counts=counts)
        split.own.note_handover(5e-3)
    for _ in range(1000):
        split.own.note_handover(5e-3)
    assert split.enter(counts=counts) == NONE
    assert split.enter() == Split().enter(), "never longer than the measured round trip"


def test_a_policy_needs_no_measurements() -> None:
    split = Split(policy=all_on_cpu)
    split.own.note_gap(F, 1.0)
    split.own.note_job(F, [8], 1.0)
    split.own.note_handover(1.0)
    assert split.enter() == set(range(N))
