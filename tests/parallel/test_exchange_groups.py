"""Token rows that travel in groups of experts give the training of plain PyTorch: three steps."""

import functools
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.device_mesh import DeviceMesh

from overspill.moe.settings import Settings
from overspill.parallel.exchange.staged import StagedExchange
from overspill.transfer.streams import Defer
from tests.fuzz.late import LateStream
from tests.moe.oracle import Task
from tests.parallel.training import (
    Case,
    Result,
    assert_follows,
    plain,
    results_of,
    train_rank,
)
from tests.slow import chosen, slow_names


def late(kind: str) -> None:
    """Replaced on each rank, by `Late`."""


def late_through_host(kind: str) -> None:
    """The same, and rows travel as from a GPU over gloo, by a thread."""


class Late:
    """Exchanges end late, as on a GPU; other transfers begin late, on each rank at other times."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)
        self.stream = LateStream(str(rank), 0, longest=1e-3)

    def __call__(self, kind: str) -> Defer | None:
        if kind in ("exchange", "exchange in"):
            return self.stream.defer
        if self._random.random() < 0.2:
            time.sleep(self._random.random() * 2e-3)
        return None


def settings(groups: int, rows: str = "send", **options: Any) -> Settings:
    return Settings(exchange_groups=groups, received_rows=rows, **options)


TASK = Task(n_layers=2, lr=1e-3, steps=3)  # five experts: ranks have three and two of them
ON_DISK = {"mode": "disk", "slots": 2, "host_slots": 2}
DYNAMIC: dict[str, Any] = {"placement": "dynamic", "inject": late}

CASES = {
    "two groups in host memory, late": Case(TASK, settings=settings(2, inject=late)),
    "a group for each expert, kept rows, late, recomputed blocks": Case(
        replace(TASK, starve=True, checkpoint=True), settings=settings(3, "keep", inject=late)
    ),
    "one group, kept rows": Case(TASK, settings=settings(1, "keep")),
    "disk, one of each layer resident, clipping and accumulation": Case(
        replace(TASK, clip=0.5, micro_batches=2),
        settings=settings(3, "keep"),
        where={**ON_DISK, "gpu_experts": 2},
    ),
    "experts on the device, late, uneven batches": Case(
        TASK, uneven=True, settings=settings(3, inject=late), where={"mode": "gpu"}
    ),
    "kept activations, recomputed blocks": Case(
        replace(TASK, checkpoint=True), settings=settings(2, activations="keep")
    ),
    "dynamic placement, late": Case(TASK, settings=settings(3, "keep", **DYNAMIC)),
    "through host memory, late": Case(TASK, settings=settings(3, inject=late_through_host)),
    "four ranks, clipped, late": Case(
        replace(TASK, clip=0.5), n_ranks=4, uneven=True, settings=settings(2, inject=late)
    ),
    "four ranks, dynamic, one expert with most tokens": Case(
        replace(TASK, top_k=1), hot=True, n_ranks=4, settings=settings(2, **DYNAMIC)
    ),
}

SLOW = (
    "two groups in host memory, late",
    "one group, kept rows",
    "experts on the device, late, uneven batches",
    "kept activations, recomputed blocks",
    "four ranks, dynamic, one expert with most tokens",
)


def train(mesh: DeviceMesh, case: Case) -> Result:
    if case.settings.inject not in (late, late_through_host):
        return train_rank(mesh, case)
    inject = Late(mesh.get_local_rank())
    staged = case.settings.inject is late_through_host
    case = replace(case, settings=replace(case.settings, inject=inject))
    with patch("overspill.moe.engine.exchange_among", StagedExchange) if staged else nullcontext():
        found = train_rank(mesh, case)
    inject.stream.close()
    return found


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Result]]:
    disk = tmp_path_factory.mktemp("disk")
    found = {
        name: replace(case, where={**case.where, "disk": disk}) if "disk" in name else case
        for name, case in chosen(request, CASES, *SLOW).items()
    }
    return results_of(found, train)


@functools.cache
def plain_training(task: Task, n_ranks: int, uneven: bool, hot: bool) -> Result:
    return plain(Case(task, n_ranks, uneven, hot=hot))


@pytest.mark.parametrize("name", slow_names(CASES, *SLOW))
def test_ranks_follow_plain_training(name: str, results: dict[str, list[Result]]) -> None:
    case = CASES[name]
    assert_follows(results[name], plain_training(case.task, case.n_ranks, case.uneven, case.hot))
