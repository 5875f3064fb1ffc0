"""`zero_grad()` of the model, a module or the optimizer drops gradients of experts as in torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.core.errors import OrderError
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from tests.moe.oracle import (
    HOME_OR_NOT,
    SOME_AT_HOME,
    Run,
    Task,
    adamw,
    assert_follows,
    delays,
    loss_of,
    spilled,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows

Drop = Callable[[GPTMoE, torch.optim.Optimizer], None]
DROPS: dict[str, Drop] = {
    "model.zero_grad()": lambda model, _: model.zero_grad(),
    "model.zero_grad(False)": lambda model, _: model.zero_grad(set_to_none=False),
    "opt.zero_grad()": lambda _, optimizer: optimizer.zero_grad(),
    "opt.zero_grad(False)": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "one layer": lambda model, _: model.blocks[1].zero_grad(),
}


def run(model: GPTMoE, optimizer: Any, task: Task, drop: Drop, complete: bool) -> Run:
    """Two micro-batches a step; `drop` is called between them, or (`complete`) before step()."""
    result = Run()
    offloaded = isinstance(optimizer, overspill.AdamW)

    def backward(tokens: Tensor, last: bool) -> None:
        loss = loss_of(model, tokens)
        if offloaded and not last:
            with optimizer.accumulate():
                loss.backward()
        else:
            loss.backward()
        result.losses.append(loss.item())

    for first, second in task.batches():
        backward(first, last=False)
        if not complete:
            drop(model, optimizer)
        backward(second, last=True)
        if complete:
            drop(model, optimizer)
        if task.clip is not None and not offloaded:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
    result.weights = weights_of(model)
    return result


@pytest.mark.parametrize(
    ("where", "when", "drop"),
    slow_rows(
        all_pairs(
            HOME_OR_NOT,
            [(None, False), (0.5, False), (0.5, True)],
            ["model.zero_grad()", "opt.zero_grad()", "one layer"],
        ),
        1,
        4,
        5,
    ),
)
def test_dropped_gradients_are_those_of_the_plain_model(
    where: str, when: tuple[float | None, bool], drop: str, tmp_path: Path
) -> None:
    clip, complete = when
    check(where, tmp_path, clip, DROPS[drop], complete)


@pytest.mark.parametrize(
    ("where", "clip", "drop"),
    all_pairs(HOME_OR_NOT, [None, 0.5], ["model.zero_grad(False)", "opt.zero_grad(False)"]),
)
def test_gradients_that_are_set_to_zero_between_micro_batches_are_dropped(
    where: str, clip: float | None, drop: str, tmp_path: Path
) -> None:
    check(where, tmp_path, clip, DROPS[drop], complete=False)


def check(where: str, disk: Path, clip: float | None, drop: Drop, complete: bool) -> None:
    task = Task(steps=2, micro_batches=2, clip=clip, n_layers=2)
    plain, model = task.model(), task.model()
    options = {"lr": task.lr, "weight_decay": task.weight_decay}
    optimizer = torch.optim.AdamW(plain.parameters(), **options)
    expected = run(plain, optimizer, task, drop, complete)
    slow = Settings(inject=delays(seed=5, only="optimizer"))
    with spilled(model, where, disk, slow):
        got = run(model, adamw(model, task), task, drop, complete)
    assert_follows(got, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_model_zero_grad_after_an_update_during_backward_is_refused(
    where: str, set_to_none: bool, tmp_path: Path
) -> None:
    task = Task(steps=1)
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        loss_of(model, next(task.batches())[0]).backward()
        with pytest.raises(OrderError, match=r"updated during backward.*step\(\) first"):
            model.zero_grad(set_to_none)
        with pytest.raises(OrderError, match="load the last checkpoint"):
            optimizer.step()  # other gradients are gone


def test_a_refused_zero_grad_of_the_optimizer_drops_nothing(tmp_path: Path) -> None:
    task = Task(steps=1)
    model = task.model()
    with spilled(model, "host with 2 slots", tmp_path):
        optimizer = adamw(model, task)
        loss_of(model, next(task.batches())[0]).backward()
        with pytest.raises(OrderError):
            optimizer.zero_grad()
        assert model.embedding.weight.grad is not None
        optimizer.step()
