"""Which passes the search for a number of partitions counts."""

import itertools

import torch

from overspill.core.expert_map import ExpertMap
from overspill.moe.pipeline.tuner import Tuner
from overspill.parallel.exchange.interface import LocalExchange

TOKENS, EXPERTS = 16, 2


def passes(tuner: Tuner, most: int) -> list[int]:
    """The number of partitions of each training pass until it is chosen."""
    exchange, tried = LocalExchange("cpu"), []
    ids = torch.zeros(TOKENS, 1, dtype=torch.int64)
    while tuner.search.settled(TOKENS) is None and len(tried) < most:
        rows, timer = tuner.route(ids, ExpertMap.whole(EXPERTS), exchange, True, torch.float32)
        tried.append(len(rows.partitions))
        if timer is not None:
            for point in ("begin_forward", "end_forward", "begin_backward", "end_backward"):
                getattr(timer, point)()
    return tried


def test_two_passes_that_allocate_memory_are_not_counted_for_each_number() -> None:
    calls = itertools.count()
    allocating = passes(Tuner(None, allocations=lambda _: next(calls)), 60)
    usual = passes(Tuner(None, allocations=lambda _: 0), 60)
    assert usual[:4] == [1, 1, 2, 2]
    assert allocating[:6] == [1, 1, 1, 2, 2, 2]
    assert len(allocating) < 60, "the search ends although every pass allocates memory"


def test_a_second_backward_that_fails_is_not_counted() -> None:
    tuner, exchange = Tuner(None), LocalExchange("cpu")
    ids = torch.zeros(TOKENS, 1, dtype=torch.int64)
    for _ in range(3):
        _, timer = tuner.route(ids, ExpertMap.whole(EXPERTS), exchange, True, torch.float32)
        assert timer is not None
        for point in ("begin_forward", "end_forward", "begin_backward", "end_backward"):
            getattr(timer, point)()
        timer.begin_backward()
    assert tuner.search.settled(TOKENS) is None
