"""Ranks that compute experts of each other train as one process with the batches of all: three
steps."""

import random
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from overspill.moe.settings import Settings
from tests.moe.oracle import Task
from tests.parallel.training import Case, Result, assert_follows, plain, results_of, train_rank
from tests.slow import chosen, slow_names


def delay(kind: str) -> None:
    if random.random() < 0.3:
        time.sleep(random.random() * 3e-3)


def delay_updates(kind: str) -> None:
    """The next forward of rank 0 needs experts of rank 1 before they are updated."""
    if kind == "optimizer" and dist.get_rank() == 1:
        time.sleep(8e-3)


TASK = Task(n_layers=2, lr=1e-3, steps=5)  # five experts: neither 2 nor 4 ranks divide them
HOT = replace(TASK, top_k=1)
DYNAMIC = Settings(placement="dynamic")
DELAYED = replace(DYNAMIC, inject=delay)
SLOW = replace(DYNAMIC, inject=delay_updates)
PLAIN = replace(DYNAMIC, overlap_updates=False, overlap_uploads=False, waves=False)

CASES = {
    "clipping and accumulation, delays": Case(
        replace(TASK, clip=0.5, micro_batches=2), settings=DELAYED
    ),
    "accumulation": Case(
        replace(TASK, micro_batches=3), where={"mode": "host", "slots": 8}, settings=DYNAMIC
    ),
    "slow updates, more layers than halves of an outbox": Case(
        replace(TASK, n_layers=4), settings=SLOW
    ),
    "kept activations, delays": Case(TASK, settings=replace(DELAYED, activations="keep")),
    "native uploader, recomputed blocks": Case(
        replace(TASK, checkpoint=True), settings=replace(DYNAMIC, uploader="native")
    ),
    "four ranks, one expert with most tokens, uneven batches, clipped, delays": Case(
        replace(HOT, clip=0.5, micro_batches=2), hot=True, uneven=True, settings=DELAYED, n_ranks=4
    ),
    "four ranks, no overlap, an expert without tokens, uneven batches": Case(
        replace(TASK, starve=True), uneven=True, settings=PLAIN, n_ranks=4
    ),
}

BY_HAND = (
    "accumulation",
    "kept activations, delays",
    "four ranks, no overlap, an expert without tokens, uneven batches",
)


def train(mesh: DeviceMesh, case: Case) -> Result:
    random.seed(mesh.get_local_rank())  # each rank is slow at other times
    return train_rank(mesh, case)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    return results_of(chosen(request, CASES, *BY_HAND), train)


@pytest.mark.parametrize("name", slow_names(CASES, *BY_HAND))
def test_ranks_follow_plain_training(name: str, results: dict[str, list[Result]]) -> None:
    case, ranks = CASES[name], results[name]
    assert_follows(ranks, plain(case))
    balance = ranks[0].balance
    assert balance is not None
    assert all(result.balance == balance for result in ranks)
    assert balance.placed <= 1.25
    assert balance.static > balance.placed + 0.05
    if case.hot:  # it has about 60% of the rows
        assert balance.static >= 2.2
