"""The pipelined layer on a GPU: real streams, and delays on each of them in turn."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overspill
from bench.loopback import LoopbackExchange
from overspill.compute.activation import ActivationGrads, Fused
from overspill.core.expert_map import ExpertMap
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

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
DELAYS = ("no", "exchange", "host copies", "compute")
CYCLES = 1_000_000  # of a delay, half a millisecond
SIZES: dict[str, Any] = {"device": "cuda", "d_model": 128, "d_hidden": 256, "tokens": 600}


class SlowActivation(Fused):
    """Delays the compute stream, which everything else must wait for."""

    def forward(self, h: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return super().forward(h)

    def backward(
        self, h: Tensor, da_RH: Tensor, row_weight_R: Tensor, overwrite_h: bool
    ) -> ActivationGrads:
        torch.cuda._sleep(CYCLES)
        return super().backward(h, da_RH, row_weight_R, overwrite_h)


def slow(kind: str) -> Any:
    def inject(name: str) -> None:
        if name == kind:
            torch.cuda._sleep(CYCLES)

    return inject


def run_delayed(case: Case, delay: str, mesh: DeviceMesh | None = None, rank: int = 0) -> Result:
    exchange = backend(case.backend, mesh, "cuda", slow(delay))
    layer = case.layer(exchange=exchange, mesh=mesh)
    if delay == "compute":
        layer._activation = SlowActivation(layer.shape.gated)
    run(case, layer, rank)  # a second pass uses the memory of the first
    return run(case, layer, rank)


def compare(case: Case, got: Result, want: Result) -> None:
    for name, mine, theirs in zip(Result._fields, got, want, strict=True):
        error = (mine.float() - theirs).norm()
        limit = 1e-5 if case.dtype == torch.float32 else 3e-2
        assert error <= limit * (1 + theirs.norm()), (case, name, error, theirs.norm())


FUSED = KINDS[:2]
ROWS = all_pairs((1, 2, 3, 8), STRATEGIES, FUSED, (1, 2), LOADS, ("local", "loopback"), DELAYS)


def test_float32_equals_the_loop_over_experts() -> None:
    for *row, delay in ROWS:
        case = Case(*row, **SIZES)
        compare(case, run_delayed(case, delay), naive(case, 1)[0])


def test_bfloat16_is_as_close_as_its_rounding() -> None:
    for *row, delay in ROWS:
        case = Case(*row, dtype=torch.bfloat16, **SIZES)
        compare(case, run_delayed(case, delay), naive(case, 1)[0])


def run_rank(mesh: DeviceMesh, found: list[tuple[Case, str]]) -> list[Result]:
    rank = mesh.get_local_rank()
    return [run_delayed(case, delay, mesh, rank) for case, delay in found]


def test_ranks_that_share_a_gpu() -> None:
    axes = (1, 2, 4), STRATEGIES, FUSED, (1, 2), LOADS, ("staged",), ("no", "compute")
    found = [(Case(*row, **SIZES), delay) for *row, delay in all_pairs(*axes)]
    results = run_ranks(2, run_rank, found, method="spawn", timeout=200.0)
    for rank, got in enumerate(results):
        assert not isinstance(got, Exception), got
        held = [*ExpertMap.part(N_EXPERTS, rank, 2).local_ids]
        for (case, _), mine in zip(found, got, strict=True):
            want = naive(case, 2)[rank]
            compare(case, mine, want._replace(dw_in=want.dw_in[held], dw_out=want.dw_out[held]))


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def test_nccl(nccl: DeviceMesh) -> None:
    """One rank: several on one GPU are not supported by NCCL."""
    for n, strategy in ((1, "none"), (3, "S1"), (4, "S2"), (8, "S4")):
        for delay in ("no", "exchange", "compute"):
            case = Case(n, strategy, FUSED[n % 2], 2, "even", "collective", **SIZES)
            compare(case, run_delayed(case, delay, nccl), naive(case, 1)[0])


def milliseconds(work: Any) -> float:
    """Of the fastest of some rounds: other processes may use the GPU."""
    found = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(float(begin.elapsed_time(end)))
    return min(found[2:])


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_a_throttled_loopback_takes_the_time_of_its_bytes(rate: float) -> None:
    exchange = LoopbackExchange("cuda", rate)
    rows = torch.randn(32, 1 << 14, device="cuda")  # 2 MiB
    want = rows.nbytes / rate / 1e6
    arrived = []

    def transfer() -> None:
        arrived.append(exchange.send(rows, [32], [32]).wait())

    alone = milliseconds(transfer)
    assert want * 0.99 < alone < want * 1.1 + 0.5  # and the launches
    assert torch.equal(arrived[-1], rows)
    left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def compute() -> None:
        for _ in range(4):
            torch.mm(left, right)

    computing = milliseconds(compute)

    def both() -> None:
        arrival = exchange.send(rows, [32], [32])
        compute()
        arrival.wait()

    assert milliseconds(both) < max(alone, computing) * 1.25 + 0.2


@pytest.mark.parametrize("rate", [6, 50])
def test_the_speed_of_a_link_is_measured_without_the_time_to_queue_it(rate: float) -> None:
    exchange = LoopbackExchange("cuda", rate)
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layer = overspill.MoELayer(768, 3072, 1, 1, exchange=exchange, **kind)
    y, _ = layer(torch.randn(64, 768, requires_grad=True, **kind))
    y.sum().backward()
    assert layer.speeds is not None
    assert 0.7 * rate < layer.speeds.exchange / 1e9 < 1.05 * rate


def test_reuse_saves_memory() -> None:
    case = Case(8, "none", FUSED[0], 1, "even", "loopback", **SIZES)
    case = replace(case, d_model=512, d_hidden=2048, tokens=8192, dtype=torch.bfloat16)
    peaks = {}
    for strategy in STRATEGIES:
        one = replace(case, strategy=strategy)
        layer = one.layer(exchange=LoopbackExchange("cuda"))
        x = one.x(0)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y, balance = layer(x)
            (y.float().sum() + balance).backward()
            peaks[strategy] = torch.cuda.max_memory_allocated() - before
            del y, balance
    kept = 8192 * (512 + 2048) * 2  # T_DI and T_M
    for strategy in STRATEGIES[1:]:
        assert peaks["none"] - peaks[strategy] > 0.5 * kept, peaks


def test_the_search_ends_and_the_strategy_is_measured() -> None:
    layer = overspill.MoELayer(
        512, 2048, 4, 2, exchange=LoopbackExchange("cuda", 10.0), device="cuda"
    )
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)
    for _ in range(20):
        with torch.autocast("cuda", torch.bfloat16):
            y, balance = layer(x)
        (y.float().square().mean() + balance).backward()
    assert y.dtype == torch.bfloat16
    assert layer.w_in.grad is not None
    assert layer.w_in.grad.dtype == torch.float32
    assert layer.strategy in STRATEGIES[1:]
    assert layer.best_partitions(4096) in (1, 2, 4, 8)
