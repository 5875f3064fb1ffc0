"""Token rows of one process that travel in groups of experts through a loopback: the training is
that of plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from bench.loopback import LoopbackExchange, loop_back
from overspill.core.errors import ConfigError
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from tests.fuzz.late import LateStream
from tests.moe import gpu_training
from tests.moe.oracle import Task, adamw, assert_follows, plain_run, spilled, train

TASK = Task(n_layers=2, clip=0.5, micro_batches=2)


@pytest.mark.parametrize(
    ("where", "groups", "rows"),
    [
        pytest.param("gpu", 2, "keep", marks=pytest.mark.slow),
        ("host with 2 slots", 5, "auto"),
        ("disk, 5 resident", 3, "keep"),
        pytest.param("host, 7 resident", None, "send", marks=pytest.mark.slow),
    ],
)
def test_rows_that_arrive_late_do_not_change_training(
    where: str, groups: int | None, rows: str, tmp_path: Path
) -> None:
    model = TASK.model()
    stream = LateStream("loopback", 1, longest=1e-3)
    settings = Settings(exchange_groups=groups, received_rows=rows)
    with spilled(model, where, tmp_path, settings) as engine:
        loop_back(engine, LoopbackExchange("cpu", inject=lambda kind: stream.defer))
        run = train(model, adamw(model, TASK), TASK)
    stream.close()
    assert_follows(run, plain_run(TASK))


def test_an_exchange_that_is_impossible_is_refused(tmp_path: Path) -> None:
    model, loopback = TASK.model(), LoopbackExchange("cpu")
    with spilled(model, "gpu", tmp_path, Settings(exchange_groups=6)) as engine:
        with pytest.raises(ConfigError, match="exchange_groups=6 exceeds the 5 experts"):
            loop_back(engine, loopback)
        engine.switch(Settings(threads=1, exchange_groups=5))
        loop_back(engine, loopback)
        with pytest.raises(ConfigError, match="exchange_groups=6 exceeds the 5 experts"):
            engine.switch(Settings(threads=1, exchange_groups=6))
        with pytest.raises(ConfigError, match="is not supported with cpu_experts"):
            engine.switch(Settings(threads=1, cpu_experts=True, exchange_groups=5))


def slow(kind: str) -> Any:
    def inject(name: str) -> None:
        if name == kind:
            torch.cuda._sleep(1_000_000)  # half a millisecond

    return inject


def losses_on_gpu(groups: int | None, delay: str, rows: str) -> list[float]:
    """Without `groups` no rows travel."""
    steps, seed = 5, 3
    model = GPTMoE(gpu_training.CONFIG, seed=seed, device="cuda", dtype=torch.float32)
    settings = Settings(exchange_groups=groups, received_rows=rows, inject=slow(delay))
    overspill.offload(
        model, gpu_memory="2GiB", mode="host", slots=3, gpu_experts=8, settings=settings, quiet=True
    )
    engine: Any = model.overspill
    if groups is not None:
        loop_back(engine, LoopbackExchange("cuda", 6, inject=slow(delay)))
    optimizer, losses = overspill.AdamW(model, lr=3e-3), []
    for tokens in gpu_training.batches(steps, seed):
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.check_conserved()
    engine.close()
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("delay", ["no", "exchange", "upload", "download"])
@pytest.mark.parametrize("rows", ["send", "keep", "auto"])
def test_groups_on_a_gpu_have_the_losses_of_no_exchange(delay: str, rows: str) -> None:
    want = losses_on_gpu(None, "no", "send")
    for groups in (1, 3, 8):
        assert losses_on_gpu(groups, delay, rows) == pytest.approx(want, rel=2e-4)
