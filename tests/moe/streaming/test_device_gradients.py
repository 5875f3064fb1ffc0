"""Gradients of micro-batches are added on the compute device where it has room: no bit changes."""

from pathlib import Path

import pytest
import torch

from overspill.compute.cpu_kernel import cpu_isa
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from tests.moe.fake_memory import FakeMemory
from tests.moe.oracle import (
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    delays,
    loss_of,
    observe_passes,
    plain_run,
    spilled,
    streamed_run,
    train_step,
    weights_of,
)
from tests.moe.streaming.frozen import SmallTask, cpu_settings
from tests.moe.streaming.policies import random_policy
from tests.slow import slow_rows

TASKS = [
    Task(n_layers=2, steps=3, micro_batches=3),
    Task(n_layers=2, steps=3, micro_batches=2, starve=True, top_k=1),
    Task(n_layers=2, steps=3, micro_batches=2, clip=0.5, starve=True, dtype=torch.bfloat16),
    Task(n_layers=2, steps=3, micro_batches=2, clip=0.5, checkpoint=True),
]
WHERE = ["host with 5 slots", "disk behind 3 host slots"]


def give_room(engine: Engine, sums: float) -> None:
    """Room for the sums of gradients of so many experts."""
    memory = FakeMemory(engine, other=1 << 16)
    size = engine.layout.weight_bytes
    engine.memory.fill(memory, int((memory.peak() + sums * size) / 0.98))


def accumulated_run(
    task: Task, where: str, disk: Path, sums: float, settings: Settings | None = None
) -> Run:
    model, run = task.model(), Run()
    with spilled(model, where, disk, host_memory="2GiB", settings=settings) as engine:
        optimizer = adamw(model, task)
        give_room(engine, sums)
        for number, batches in enumerate(task.batches()):
            run.losses.append(train_step(model, optimizer, batches))
            if optimizer.total_norm is not None:
                run.norms.append(optimizer.total_norm)
            if number == 0:
                assert engine.memory.share.gradients == 0
                observe_passes(model, batches[0])
        assert engine.memory.share.gradients > 0
        engine.check_conserved()
        run.weights = weights_of(model)
    return run


@pytest.mark.parametrize(
    ("task", "where", "sums"),
    slow_rows(zip(TASKS, [*WHERE, *reversed(WHERE)], [4.5, 10.5] * 2, strict=True), 0, 1),
    ids=str,
)
def test_sums_on_the_device_follow_plain_training(
    task: Task, where: str, sums: float, tmp_path: Path
) -> None:
    run = accumulated_run(task, where, tmp_path, sums)
    assert_same_bits(run, streamed_run(task))
    if task.dtype == torch.float32:
        assert_follows(run, plain_run(task))


@pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")
@pytest.mark.parametrize("clip", slow_rows([None, 0.5], 0))
def test_sums_on_the_device_join_gradients_that_the_cpu_forms(
    clip: float | None, tmp_path: Path
) -> None:
    """Of one expert in the micro-batches of one step, in any order."""
    task = SmallTask(frozen=(), n_layers=2, steps=3, micro_batches=4, clip=clip)
    settings = cpu_settings(random_policy(6), cpu_training=True, inject=delays(6, longest=5e-4))
    run = accumulated_run(task, WHERE[0], tmp_path, 8.5, settings)
    assert_follows(run, plain_run(task))


def test_delays_change_nothing(tmp_path: Path) -> None:
    task = TASKS[1]
    run = accumulated_run(task, WHERE[0], tmp_path, 7.5, Settings(inject=delays(seed=4)))
    assert_same_bits(run, streamed_run(task))


def test_a_step_may_end_with_an_accumulated_backward_or_drop_it(tmp_path: Path) -> None:
    """Sums that no backward completes are used by step(), and dropped by zero_grad()."""
    task = Task(n_layers=2, steps=3, micro_batches=2)
    models, losses = [task.model(), task.model()], []
    for model, room in zip(models, (0.0, 9.5), strict=True):
        with spilled(model, "host with 5 slots", tmp_path, host_memory="2GiB") as engine:
            optimizer = adamw(model, task)
            give_room(engine, room)
            found = []
            for first, second in task.batches():
                for tokens in (first, second):
                    with optimizer.accumulate():
                        loss_of(model, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                with optimizer.accumulate():
                    loss_of(model, second).backward()
                optimizer.zero_grad()
                with torch.no_grad():
                    found.append(loss_of(model, second).item())
                if len(found) == 1:
                    observe_passes(model, second)
            assert (engine.memory.share.gradients > 0) == (room > 0)
            engine.check_conserved()
            losses.append(found)
    assert losses[0] == losses[1]


def test_another_optimizer_drops_sums_of_an_unfinished_step(tmp_path: Path) -> None:
    task = Task(n_layers=2, steps=3, micro_batches=2)
    model = task.model()
    with spilled(model, "host with 5 slots", tmp_path, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        give_room(engine, 9.5)
        first, second, last = task.batches()
        train_step(model, optimizer, first)
        observe_passes(model, first[0])
        train_step(model, optimizer, second)
        with optimizer.accumulate():
            loss_of(model, last[0]).backward()
        optimizer = None
        optimizer = adamw(model, task)
        engine.check_conserved()
        train_step(model, optimizer, last)
        assert engine.memory.share.gradients > 0
    assert engine.memory.share.gradients == 0, "closing releases the memory"
