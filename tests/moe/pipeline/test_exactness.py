"""The pipelined layer computes what a loop over experts does: output, loss and all gradients."""

import functools
import itertools
import random
import time
import zlib
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from overspill.core.expert_map import ExpertMap
from overspill.moe.pipeline.rows import (
    Division,
    SortedRows,
    divide_rows,
    key_counts,
)
from overspill.parallel.exchange.interface import LocalExchange
from overspill.transfer.streams import Defer, Inject
from tests.fuzz.late import LateStream
from tests.moe.pipeline.cases import (
    KINDS,
    LOADS,
    N_EXPERTS,
    STRATEGIES,
    Case,
    Result,
    backend,
    naive,
    run,
)
from tests.pairs import all_pairs
from tests.parallel.processes import run_ranks

WHERE = [
    *((name, 1) for name in ("local", "loopback", "collective", "staged")),
    *((name, n_ranks) for n_ranks in (2, 4) for name in ("collective", "staged")),
]


@functools.cache
def rows() -> list[tuple[Any, ...]]:
    """Each value of an axis meets each value of every other axis."""
    axes = range(1, 9), STRATEGIES, KINDS, (1, 2), LOADS, WHERE, (False, True)

    def allowed(*row: Any) -> bool:  # some of all combinations, to choose among fewer
        return zlib.crc32(repr(row).encode()) % 8 == 0

    return all_pairs(*axes, allowed=allowed)


def cases(n_ranks: int, *backends: str) -> list[Case]:
    return [
        Case(*row[:5], row[5][0], row[6])
        for row in rows()
        if row[5][1] == n_ranks and row[5][0] in backends
    ]


class Delays:
    """Transfers end late, or begin late on some ranks."""

    def __init__(self, rank: int) -> None:
        self._streams = [LateStream(str(rank), 0, longest=1e-3), LateStream("x", 1, longest=1e-3)]
        self._random = random.Random(rank)

    def __call__(self, kind: str) -> Defer | None:
        if self._random.random() < 0.5:
            time.sleep(5e-4)
        if kind == "exchange out":  # by a thread, which waits for it
            return None
        return self._streams[kind == "host copies"].defer

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def run_cases(mesh: DeviceMesh | None, found: list[Case], rank: int = 0) -> list[Result]:
    delays = Delays(rank)
    exchanges: dict[Any, Any] = {}
    results = []
    for case in found:
        inject: Inject | None = delays if case.late else None
        key = case.backend, case.late
        if key not in exchanges:
            exchanges[key] = backend(case.backend, mesh, "cpu", inject)
        layer = case.layer(exchange=exchanges[key], mesh=mesh)
        results.append(run(case, layer, rank))
    delays.close()
    return results


def run_rank(mesh: DeviceMesh, found: list[Case]) -> list[Result]:
    return run_cases(mesh, found, mesh.get_local_rank())


def compare(case: Case, rank: int, n_ranks: int, got: Result, want: Result) -> None:
    held = [*ExpertMap.part(N_EXPERTS, rank, n_ranks).local_ids]
    want = want._replace(dw_in=want.dw_in[held], dw_out=want.dw_out[held])
    for name, mine, theirs in zip(Result._fields, got, want, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{case}, {n}: {m}"
        )


def test_one_process() -> None:
    found = cases(1, "local", "loopback")
    for case, got in zip(found, run_cases(None, found), strict=True):
        compare(case, 0, 1, got, naive(case, 1)[0])


@pytest.mark.parametrize("n_ranks", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_ranks(n_ranks: int) -> None:
    found = cases(n_ranks, "collective", "staged")
    results = run_ranks(n_ranks, run_rank, found)
    for rank, got in enumerate(results):
        assert not isinstance(got, Exception), got
        for case, mine in zip(found, got, strict=True):
            compare(case, rank, n_ranks, mine, naive(case, n_ranks)[rank])


def test_ends_of_experts_are_contiguous() -> None:
    """Grouped kernels read them by their address."""
    ids, experts = torch.randint(0, N_EXPERTS, (50, 2)), ExpertMap.whole(N_EXPERTS)
    division = Division(4)
    keys = division.keys(ids, N_EXPERTS)
    counts_GPE = key_counts(keys, 4 * N_EXPERTS).view(1, 4, N_EXPERTS).numpy()
    rows = divide_rows(SortedRows.sort(keys, division), counts_GPE, experts, LocalExchange("cpu"))
    for part in rows.partitions:
        assert part.ends.is_contiguous()
        assert part.ends.tolist() == [*itertools.accumulate(part.counts)]


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
def test_keys_follow_the_bounds_of_partitions(n: int, even: bool) -> None:
    division = Division(n, even)
    for n_tokens in (0, 1, 5, 8, 50, 1001):
        keys = division.keys(torch.zeros(n_tokens, 1, dtype=torch.int64), 1).view(-1)
        bounds = division.bounds(n_tokens)
        expected = [p for p in range(n) for _ in range(bounds[p], bounds[p + 1])]
        assert keys.tolist() == expected


def test_the_first_and_the_last_of_uneven_partitions_have_half_the_size() -> None:
    assert Division(4, even=False).bounds(60) == [0, 10, 30, 50, 60]
    assert Division(2, even=False).bounds(60) == [0, 30, 60]
    assert Division(1, even=False).bounds(60) == [0, 60]
