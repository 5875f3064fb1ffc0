"""The passes that the search for a number of partitions counts."""

import torch

from overspill.core.expert_map import ExpertMap
from overspill.moe.pipeline.tuner import Tuner
from overspill.parallel.exchange.interface import LocalExchange

TOKENS, EXPERTS = 16, 2


def test_a_second_backward_that_fails_is_not_counted() -> None:
    tuner, exchange = Tuner(None), LocalExchange("cpu")
    ids = torch.zeros(TOKENS, 1, dtype=torch.int64)
    for _ in range(9):
        _, timer = tuner.route(ids, ExpertMap.whole(EXPERTS), exchange, True, torch.float32)
        assert timer is not None
        for point in ("begin_forward", "end_forward", "begin_backward", "end_backward"):
            getattr(timer, point)()
        timer.begin_backward()
    assert tuner.search.settled(TOKENS) is None
