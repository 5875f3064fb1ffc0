"""Two ranks that share one GPU, over gloo, train as one process with both batches."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.core.experts import ExpertShape
from overspill.models.gpt import GPTMoE
from overspill.models.placement_costs import measured_costs
from overspill.moe.settings import Settings
from overspill.tiers.layout import RecordLayout
from overspill.tiers.shared_memory import SharedMemory
from overspill.tiers.slab import HostSlab
from tests.moe.gpu_training import CONFIG, batches
from tests.parallel.processes import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
STEPS, RANKS, CLIP, LR = 5, 2, 0.5, 3e-3
CYCLES = 1_000_000  # of a delay, half a millisecond
DYNAMIC = Settings(threads=2, placement="dynamic")
MODES: list[dict[str, Any]] = [
    {"mode": "gpu"},
    {"mode": "host", "slots": 2},
    {"mode": "host", "slots": 4, "settings": DYNAMIC},
    {"mode": "disk", "slots": 4, "host_slots": 5, "gpu_experts": 6},
]


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    dense: dict[str, Tensor]


def new_model(dtype: torch.dtype) -> GPTMoE:
    return GPTMoE(CONFIG, seed=5, device="cuda", dtype=dtype)


def loss_of(model: GPTMoE, tokens: Tensor) -> Tensor:
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    assert loss is not None
    return loss


def train_rank(
    mesh: DeviceMesh, where: dict[str, Any], dtype: torch.dtype, clip: float | None
) -> Trained:
    model = new_model(dtype)
    options = {"settings": Settings(threads=2), **where}
    overspill.offload(model, gpu_memory="2GiB", device="cuda", quiet=True, mesh=mesh, **options)
    optimizer = overspill.AdamW(model, lr=LR, max_grad_norm=clip)
    losses, norms = [], []
    for tokens in batches(STEPS, seed=mesh.get_local_rank()):
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(optimizer.total_norm or 0.0)
    engine: Any = model.overspill
    engine.check_conserved()
    dynamic = options["settings"].placement == "dynamic"
    assert (engine.balance.placed < engine.balance.static) is dynamic
    dense = {name: p.detach().cpu() for name, p in model.named_parameters() if p.numel()}
    engine.close()
    return Trained(losses, norms, dense)


def plain() -> tuple[list[float], list[float]]:
    model = new_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = [], []
    for parts in zip(*(batches(STEPS, seed=rank) for rank in range(RANKS)), strict=True):
        loss = torch.stack([loss_of(model, tokens) for tokens in parts]).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def trained(*args: Any) -> list[Trained]:
    results = run_ranks(RANKS, train_rank, *args, method="spawn", timeout=300.0)
    for result in results:
        if isinstance(result, Exception):
            raise result
    for name, value in results[0].dense.items():
        assert all(torch.equal(value, other.dense[name]) for other in results), name
    return results


def mean_losses(results: list[Trained]) -> list[float]:
    return [sum(pair) / RANKS for pair in zip(*(r.losses for r in results), strict=True)]


@pytest.mark.parametrize("where", MODES, ids=str)
def test_two_ranks_on_one_gpu_follow_plain_training(where: dict[str, Any], tmp_path: Path) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    results, (losses, norms) = trained(where, torch.float32, CLIP), plain()
    assert mean_losses(results) == pytest.approx(losses, rel=2e-4)
    for result in results:
        assert result.norms == pytest.approx(norms, rel=2e-3)


def delay_exchange(kind: str) -> None:
    """Compute must wait for the rows of its group."""
    if kind.startswith("exchange"):
        torch.cuda._sleep(CYCLES)


def delay_uploads(kind: str) -> None:
    """The exchange of results must wait for compute, which waits for experts."""
    if kind == "upload":
        torch.cuda._sleep(CYCLES)


@pytest.mark.parametrize("inject", [delay_exchange, delay_uploads])
@pytest.mark.parametrize("received_rows", ["send", "keep", "auto"])
def test_groups_of_experts_follow_plain_training(inject: Any, received_rows: str) -> None:
    losses, norms = plain()
    for groups in (1, 3):
        settings = Settings(
            threads=2, exchange_groups=groups, received_rows=received_rows, inject=inject
        )
        where = {"mode": "host", "slots": 2, "gpu_experts": 4, "settings": settings}
        results = trained(where, torch.float32, CLIP)
        assert mean_losses(results) == pytest.approx(losses, rel=2e-4)
        for result in results:
            assert result.norms == pytest.approx(norms, rel=2e-3)


@pytest.mark.parametrize("settings", [Settings(threads=2), DYNAMIC], ids=["static", "dynamic"])
def test_bf16_ranks_learn_and_have_the_same_dense_weights(settings: Settings) -> None:
    where = {"mode": "host", "slots": 2, "settings": settings}
    losses = mean_losses(trained(where, torch.bfloat16, None))
    assert losses[-1] < losses[0]


def test_shared_memory_is_pinned_with_its_content() -> None:
    slot = 1 << 20
    memory = SharedMemory(4 * slot, populated=4 * slot)
    memory.close_file()
    memory.bytes.fill_(7)
    slab = HostSlab("shared memory", 4, slot, pinned=True, memory=memory.bytes)
    assert slab[3].is_pinned()
    assert (slab[3].to("cuda", non_blocking=True) == 7).all()
    slab.close()
    assert not memory.bytes.is_pinned()


def test_costs_are_measured_on_the_gpu() -> None:
    shape = ExpertShape(d_model=256, d_hidden=512, gated=True)
    costs = measured_costs(RecordLayout(shape, torch.bfloat16), torch.device("cuda"))
    assert 0 < costs.wait < costs.upload < 1
    assert 0 < costs.row < 1e-3
