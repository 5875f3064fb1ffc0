"""A GPT-MoE in stages against plain PyTorch, and against the same without stages."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from tests.moe.oracle import Run, Task, adamw, plain_run, spilled, train, weights_of
from tests.pairs import all_pairs
from tests.slow import slow_rows


def train_staged(
    model: Any, stages: overspill.Stages, optimizer: overspill.AdamW, task: Task
) -> Run:
    run = Run()
    for batches in task.batches():
        losses: list[float] = []

        def loss_of(number: int, output: Any, losses: list[float] = losses) -> Tensor:
            loss: Tensor = output.loss / task.micro_batches
            losses.append(loss.item())
            return loss

        inputs = [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in batches]
        stages.backward(inputs, optimizer, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(sum(losses))
        if optimizer.total_norm is not None:
            run.norms.append(optimizer.total_norm)
    run.weights = weights_of(model)
    return run


ROWS = all_pairs(
    [1, 2, 4],
    [1, 3],
    [1, 2],
    ["host with 2 slots", "disk behind 3 host slots", "gpu"],
    [False, True],
    [None, 0.3],
    [False, True],
    [None, 2],
)


@pytest.mark.parametrize(
    ("n_stages", "count", "moe_every", "where", "checkpoint", "clip", "offload", "level"),
    slow_rows(ROWS, 0, 1, 3, 4, 5, 9),
)
def test_stages_follow_plain_training(
    n_stages: int,
    count: int,
    moe_every: int,
    where: str,
    checkpoint: bool,
    clip: float | None,
    offload: bool,
    level: int | None,
    tmp_path: Path,
) -> None:
    """The bits are those without stages (also with pre-gates of this `level`), the losses those of
    plain PyTorch."""
    task = Task(
        n_layers=4, moe_every=1 if level else moe_every, micro_batches=count,
        checkpoint=checkpoint, clip=clip, steps=2, tied=False,
    )  # fmt: skip
    runs = []
    for staged in (True, False):
        model: Any = task.model()
        with spilled(model, where, tmp_path / str(staged)):
            if level:
                overspill.pregate(model, level)
            optimizer = adamw(model, task)
            if staged:
                stages = overspill.Stages(
                    model, n_stages, offload_activations=offload, small_activation=0
                )
                runs.append(train_staged(model, stages, optimizer, task))
            else:
                runs.append(train(model, optimizer, task))
    run, expected = runs
    assert run.losses == expected.losses
    assert run.norms == expected.norms
    for name, value in expected.weights.items():
        assert torch.equal(run.weights[name], value), name
    if not level:
        assert run.losses == pytest.approx(plain_run(task).losses, rel=1e-5)
        assert run.norms == pytest.approx(plain_run(task).norms, rel=1e-5)


def test_stages_give_the_bits_of_training_without_them(tmp_path: Path) -> None:
    """In bf16, where another order of additions would show; evaluations too."""
    task = Task(n_layers=4, micro_batches=3, checkpoint=True, clip=0.3, dtype=torch.bfloat16)
    task = dataclasses.replace(task, steps=1, tied=False)
    one: Any = task.model()
    with spilled(one, "host with 2 slots", tmp_path):
        expected = train(one, adamw(one, task), task)
    model: Any = task.model()
    with spilled(model, "host with 2 slots", tmp_path):
        stages = overspill.Stages(model, 3, offload_activations=True, small_activation=0)
        run = train_staged(model, stages, adamw(model, task), task)
        (batches,) = task.batches()
        losses: list[float] = []
        inputs = [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in batches]
        model.eval()
        stages.forward(inputs, lambda _, output: losses.append(output.ce.item()))
        with torch.no_grad():
            assert losses == [model(**each).ce.item() for each in inputs]
        stages.close()
        assert type(model.blocks[0]).__mro__[1] is torch.nn.Module
    assert run.losses == expected.losses
    assert run.norms == expected.norms
    for name, value in expected.weights.items():
        assert torch.equal(run.weights[name], value), name
