"""Residency: the budget is used and never exceeded, whatever batches come."""

from hypothesis import given
from hypothesis import strategies as st

from overspill.moe.residency import Residency

EXPERT = 10
TOTAL = 60


class FakeGpu:
    """A device whose activations grow with the tokens, and whose allocator wastes some of them."""

    def __init__(self, budget: int, fixed: int, per_row: float, waste: float) -> None:
        self.budget = budget
        self.fixed = fixed
        self.per_row = per_row
        self.waste = waste
        self.homes = 0
        self.moves: list[int] = []
        self.room = TOTAL  # experts that may leave
        self._peak = 0
        self._shortages = 0
        self.overflows = 0

    def allocated(self) -> int:
        return self.fixed + self.homes * EXPERT

    def peak(self) -> int:
        return self._peak

    def shortages(self) -> int:
        return self._shortages

    def reset(self) -> None:
        self._peak = self.allocated()

    def set_homes(self, homes: int) -> None:
        self.homes = homes
        self.moves.append(homes)

    def run(self, rows: int) -> None:
        need = self.allocated() + int(rows * self.per_row)
        reserved = need + int(self.waste * rows * self.per_row)
        self._shortages += reserved > self.budget  # cached memory is freed, which takes time
        self.overflows += need > self.budget
        self._peak = max(self._peak, min(reserved, self.budget))


def train(gpu: FakeGpu, batches: list[int]) -> Residency:
    residency = Residency(gpu, gpu.budget, TOTAL, lambda: EXPERT, gpu.set_homes)
    for rows in batches:
        residency.before_pass(rows, gpu.homes)
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
        return  # does not fit whatever the homes are
    assert gpu.overflows == 0
    left = budget - gpu.allocated() - rows * per_row * (1 + waste)
    allowed = 0.16 * budget + max(2 * EXPERT, waste * rows * per_row) + EXPERT
    assert gpu.homes == TOTAL or left <= allowed
    assert len(gpu.moves) <= 6, "it settles"


def test_nothing_moves_before_the_memory_of_a_batch_is_known() -> None:
    gpu = FakeGpu(1000, 40, 1.0, 0.0)
    train(gpu, [50, 50])
    assert gpu.moves == []
    train(gpu, [50, 50, 50])
    assert gpu.moves == [60]


def test_experts_leave_before_a_larger_batch_and_return_after_it_at_most_once() -> None:
    gpu = FakeGpu(700, 40, 1.0, 0.0)
    train(gpu, [100] * 6 + [300] * 6 + [100] * 20)
    assert gpu.overflows == 0
    assert gpu.moves[0] > gpu.moves[1], "some left before the larger batch"
    assert gpu.homes * EXPERT >= 0.5 * (700 - 40 - 300)


@given(st.lists(st.integers(10, 200), min_size=5, max_size=40))
def test_batches_of_any_sizes_do_not_overflow(batches: list[int]) -> None:
    """As soon as one was observed, the memory of the next is known."""
    gpu = FakeGpu(600, 40, 1.5, 0.0)
    train(gpu, batches)
    assert gpu.overflows == 0


def test_a_shortage_makes_experts_leave() -> None:
    gpu = FakeGpu(1000, 40, 2.0, 0.0)
    train(gpu, [200] * 4)
    before = gpu.homes
    gpu.waste = 0.3  # as if another process had taken memory
    train(gpu, [200] * 12)
    assert gpu.homes < before
