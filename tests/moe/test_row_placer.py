"""Which rank computes which rows: planned, bounded by the memory for gradients, and counted."""

import numpy as np

from overspill.moe.row_placer import RowPlacer
from overspill.plan.placement import PlacementCosts, outbox_slots, static_rows

FREE = PlacementCosts(upload=0.0, row=1.0)


def test_without_costs_owners_compute_their_experts() -> None:
    tokens_E = np.array([9, 1, 0, 2])
    placer = RowPlacer(2, None)
    assert placer.balance() is None
    assert np.array_equal(placer.place(tokens_E), static_rows(tokens_E, 2))
    balance = placer.balance()
    assert balance is not None
    assert (balance.rows, balance.placed, balance.static) == ([10, 2], 10 / 6, 10 / 6)


def test_rows_are_balanced_and_compared_with_static_placement() -> None:
    placer = RowPlacer(2, FREE)
    for _ in range(3):
        assert placer.place(np.array([9, 1, 0, 2])).sum(1).tolist() == [6, 6]
    balance = placer.balance()
    assert balance is not None
    assert balance.rows == [18, 18]
    assert str(balance) == "token rows of ranks 18 18; the most over the mean 1.00 (static 1.67)"


def test_a_placement_that_needs_too_many_slots_for_gradients_is_not_used() -> None:
    tokens_E = np.array([1000] * 3 + [77] * 13)  # one rank would get all small experts
    assert outbox_slots(16, 4) == 7
    assert np.array_equal(RowPlacer(4, FREE).place(tokens_E), static_rows(tokens_E, 4))
    tokens_E = np.array([1000] * 4 + [0] * 12)
    assert RowPlacer(4, FREE).place(tokens_E).sum(1).tolist() == [1000] * 4
