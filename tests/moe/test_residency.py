"""Residency: the budget is used and never exceeded, whatever batches come."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.moe.residency import BytesEach, Residency
from overspill.plan.residents import DeviceShare

EXPERT = 10
GRADIENT = 2
TOTAL = 60


class FakeGpu:
    """A device whose activations grow with the tokens, and whose allocator wastes some of them,
    with the experts on it."""

    total = TOTAL

    def __init__(self, budget: int, fixed: int, per_row: float, waste: float) -> None:
        self.budget = budget
        self.fixed = fixed
        self.per_row = per_row
        self.waste = waste
        self.residents = 0
        self.sums = 0
        self.each = BytesEach(EXPERT)
        self.moves: list[int] = []
        self.taken = 0  # by another process
        self._peak = 0
        self._shortages = 0
        self.overflows = 0

    def allocated(self) -> int:
        return self.fixed + self.residents * EXPERT + self.sums * GRADIENT

    def peak(self) -> int:
        return self._peak

    def available(self) -> int:
        return self.budget - self.taken

    def shortages(self) -> int:
        return self._shortages

    def reset(self) -> None:
        self._peak = self.allocated()

    @property
    def share(self) -> DeviceShare:
        return DeviceShare(self.residents, self.sums)

    @property
    def most_sums(self) -> int:
        return self.total

    def bytes_each(self) -> BytesEach:
        return self.each

    def set_share(self, share: DeviceShare) -> None:
        self.residents, self.sums = share
        self.moves.append(share.experts)

    def run(self, rows: int, training: bool = True) -> None:
        activations = rows * self.per_row * (1.0 if training else 0.2)
        need = self.allocated() + int(activations)
        reserved = need + int(self.waste * activations)
        limit = self.budget - self.taken
        self._shortages += reserved > limit  # cached memory is freed, which takes time
        self.overflows += need > limit
        self._peak = max(self._peak, min(reserved, limit))


def train(gpu: FakeGpu, batches: list[int], residency: Residency | None = None) -> Residency:
    residency = residency or Residency(gpu, gpu.budget, gpu)
    for rows in batches:
        residency.before_pass(rows, training=True)
        gpu.run(rows)
    return residency


@given(st.integers(100, 2000), st.floats(0.1, 3.0), st.floats(0, 0.1), st.integers(20, 100))
def test_equal_batches_use_the_budget_without_overflow(
    budget: int, per_row: float, waste: float, rows: int
) -> None:
    fixed = 40
    gpu = FakeGpu(budget, fixed, per_row, waste)
    train(gpu, [rows] * 30)
    if fixed + rows * per_row > budget:
        return  # does not fit whatever the residents are
    assert gpu.overflows == 0
    left = budget - gpu.allocated() - rows * per_row * (1 + waste)
    allowed = 0.16 * budget + max(2 * EXPERT, waste * rows * per_row) + EXPERT
    assert gpu.residents == TOTAL or left <= allowed
    assert len(gpu.moves) <= 6, "it settles"


def test_nothing_moves_before_the_memory_of_a_batch_is_known() -> None:
    gpu = FakeGpu(1000, 40, 1.0, 0.0)
    train(gpu, [50] * 4)
    assert gpu.moves == []
    train(gpu, [50] * 5)
    assert gpu.moves == [60]


def test_experts_leave_before_a_larger_batch_and_return_after_it_at_most_once() -> None:
    gpu = FakeGpu(700, 40, 1.0, 0.0)
    train(gpu, [100] * 8 + [300] * 8 + [100] * 20)
    assert gpu.overflows == 0
    assert gpu.moves[0] > gpu.moves[1], "some left before the larger batch"
    assert gpu.residents * EXPERT >= 0.5 * (700 - 40 - 300)


@given(st.lists(st.integers(10, 200), min_size=5, max_size=40))
def test_batches_of_any_sizes_do_not_overflow(batches: list[int]) -> None:
    """As soon as one was observed, the memory of the next is known."""
    gpu = FakeGpu(600, 40, 1.5, 0.0)
    train(gpu, batches)
    assert gpu.overflows == 0


def test_a_shortage_makes_experts_leave() -> None:
    gpu = FakeGpu(1000, 40, 2.0, 0.0)
    residency = train(gpu, [200] * 6)
    before = gpu.residents
    gpu.waste = 0.3
    train(gpu, [200] * 12, residency)
    assert gpu.residents < before


def test_memory_that_another_process_takes_makes_experts_leave() -> None:
    gpu = FakeGpu(1000, 40, 1.0, 0.0)
    residency = train(gpu, [100] * 9)
    before = gpu.residents
    gpu.taken = 500
    train(gpu, [100] * 4, residency)
    assert gpu.residents < before
    assert gpu.overflows == 0


def test_a_large_evaluation_makes_room_and_training_keeps_what_it_needs() -> None:
    gpu = FakeGpu(700, 40, 1.0, 0.0)
    residency = train(gpu, [100] * 9)
    for _ in range(4):
        residency.before_pass(400, training=False)
        gpu.run(400, training=False)
    train(gpu, [100] * 10, residency)
    assert gpu.overflows == 0
    assert gpu.residents * EXPERT >= 0.8 * (700 - 40 - 100)


def test_experts_leave_before_they_need_more_memory_each() -> None:
    gpu = FakeGpu(500, 40, 1.0, 0.0)
    residency = train(gpu, [100] * 9)
    before = gpu.residents
    gpu.each = BytesEach(2 * EXPERT)
    residency.before_pass(100, training=True)
    assert gpu.residents == before // 2


def test_passes_that_need_other_memory_are_observed_first() -> None:
    gpu = FakeGpu(1000, 40, 1.0, 0.0)
    residency = train(gpu, [100] * 9)
    assert gpu.residents == TOTAL
    gpu.per_row = 6.0
    residency.begin_again()
    assert gpu.residents == 0
    train(gpu, [100] * 9, residency)
    assert 0 < gpu.residents < TOTAL
    assert gpu.overflows == 0


def test_a_move_that_does_not_fit_is_taken_back() -> None:
    class Fragmented(FakeGpu):
        def set_share(self, share: DeviceShare) -> None:
            self.moves.append(share.experts)
            if share.experts > 30:
                raise torch.OutOfMemoryError
            self.residents = share.experts

    gpu = Fragmented(500, 40, 1.0, 0.0)
    train(gpu, [100] * 60)
    assert gpu.moves[:2] == [34, 0]
    assert gpu.residents == 30


@pytest.mark.parametrize(
    ("budget", "residents", "sums"), [(240, 0, 45), (440, 20, 40), (1200, 60, 0)]
)
def test_accumulated_gradients_come_before_experts(budget: int, residents: int, sums: int) -> None:
    gpu = FakeGpu(budget, 40, 1.0, 0.0)
    gpu.each = BytesEach(EXPERT, gradient=GRADIENT)
    train(gpu, [100] * 9)
    assert gpu.residents == pytest.approx(residents, abs=2)
    assert gpu.sums == pytest.approx(sums, abs=4)
    assert gpu.overflows == 0


@pytest.mark.parametrize(
    ("budget", "residents", "kept"), [(450, 30, 0), (700, 49, 28), (1000, 60, 60)]
)
def test_experts_come_before_kept_gradients_until_few_are_streamed(
    budget: int, residents: int, kept: int
) -> None:
    gpu = FakeGpu(budget, 40, 1.0, 0.0)
    gpu.each = BytesEach(EXPERT, kept=GRADIENT)
    train(gpu, [100] * 9)
    assert gpu.residents == pytest.approx(residents, abs=3)
    assert gpu.sums == pytest.approx(kept, abs=12)
    assert gpu.overflows == 0
