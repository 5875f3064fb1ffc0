"""Ranks that divide the experts train as one process with the batches of all: five steps."""

import dataclasses

import pytest

from tests.moe.oracle import Task
from tests.parallel.processes import run_ranks
from tests.parallel.training import STEPS, Case, assert_follows, plain, train_rank

TASK = Task(n_layers=2, lr=1e-3, steps=STEPS)

CASES = {"experts that ranks do not divide": Case(TASK)}


@pytest.mark.parametrize("name", CASES)
def test_ranks_follow_plain_training(name: str) -> None:
    case = CASES[name]
    assert_follows(run_ranks(case.n_ranks, train_rank, case), plain(case))
