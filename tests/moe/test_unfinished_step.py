"""What may happen between backward and step(): a new optimizer, frozen experts, another dtype."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.core.errors import OrderError
from overspill.models.gpt import GPTMoE
from tests.moe.oracle import (
    HOME_OR_NOT,
    SOME_AT_HOME,
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    loss_of,
    plain_run,
    spilled,
    train,
    train_step,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows


class Interrupted(Exception):
    """Stands for Ctrl-C in the middle of a backward."""


def begin_step(model: GPTMoE, optimizer: overspill.AdamW, task: Task, how: str) -> None:
    """Runs a step that never gets to step()."""
    (tokens,) = next(task.batches())
    if how == "failed":
        hook = model.blocks[0].register_full_backward_pre_hook(_interrupt)
        with pytest.raises(Interrupted):
            loss_of(model, tokens).backward()
        hook.remove()
        return
    with optimizer.accumulate() if how == "accumulated" else nullcontext():
        loss_of(model, tokens).backward()


def _interrupt(*_: object) -> None:
    raise Interrupted


@pytest.mark.parametrize(
    ("where", "clip", "how"),
    slow_rows(all_pairs(HOME_OR_NOT, [None, 0.5], ["complete", "accumulated", "failed"]), 0, 2),
)
def test_a_new_optimizer_drops_an_unfinished_step(
    where: str, clip: float | None, how: str, tmp_path: Path
) -> None:
    """It trains as on a model that was just loaded, without a gradient of the old one. If experts
    were updated during the unfinished backward, the user decides how to go on."""
    task = Task(n_layers=2, steps=2, clip=clip)
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        train_step(model, optimizer, next(task.batches()))
        begin_step(model, optimizer, task, how)
        del optimizer
        gc.collect()  # a traceback may still hold it
        optimizer = adamw(model, task)
        if clip is None and how != "accumulated":
            for call in (lambda: loss_of(model, next(task.batches())[0]), optimizer.state_dict):
                with pytest.raises(OrderError, match="load the last checkpoint"):
                    call()
            model.overspill.training.keep_updates()
        weights = weights_of(model)
        run = train(model, optimizer, task)
    other = task.model()
    with spilled(other, where, tmp_path):
        other.load_state_dict(weights)
        expected = train(other, adamw(other, task), task)
    assert_same_bits(run, expected)


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize(
    "dropped_by", ["a new optimizer", "model.zero_grad()", "optimizer.load_state_dict()"]
)
def test_loading_weights_ends_a_step_that_was_given_up(
    where: str, dropped_by: str, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=2)
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        start, states = weights_of(model), optimizer.state_dict()
        (tokens,) = next(task.batches())
        loss_of(model, tokens).backward()
        if dropped_by == "model.zero_grad()":
            with pytest.raises(OrderError, match="zero_grad"):
                model.zero_grad()
            with pytest.raises(OrderError, match="load the last checkpoint"):
                optimizer.step()
        if dropped_by == "optimizer.load_state_dict()":
            optimizer.load_state_dict(states)
        else:
            del optimizer
            gc.collect()
            optimizer = adamw(model, task)
        with pytest.raises(OrderError, match="load the last checkpoint"):
            loss_of(model, tokens)
        model.load_state_dict(start)
        run = train(model, optimizer, task)
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize(
    ("where", "clip", "accumulated"), all_pairs(HOME_OR_NOT, [None, 0.5], [False, True])
)
def test_experts_that_are_frozen_between_backward_and_step_are_updated_once_more(
    where: str, clip: float | None, accumulated: bool, tmp_path: Path
) -> None:
    """As in torch, whose optimizers use the gradients that are there."""
    task = Task(n_layers=2, steps=3, clip=clip)

    def run(model: GPTMoE, optimizer: Any) -> Run:
        offloaded = isinstance(optimizer, overspill.AdamW)
        result = Run()
        for step, (tokens,) in enumerate(task.batches()):
            loss = loss_of(model, tokens)
            with optimizer.accumulate() if accumulated and offloaded else nullcontext():
                loss.backward()
            if step == 1:
                for name, parameter in model.named_parameters():
                    if ".moe." in name and "router" not in name:
                        parameter.requires_grad_(False)
            if clip is not None and not offloaded:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            result.losses.append(loss.item())
        result.weights = weights_of(model)
        return result

    plain, model = task.model(), task.model()
    options = {"lr": task.lr, "weight_decay": task.weight_decay}
    expected = run(plain, torch.optim.AdamW(plain.parameters(), **options))
    with spilled(model, where, tmp_path):
        got = run(model, adamw(model, task))
    assert_follows(got, expected)


@pytest.fixture
def bf16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_the_default_dtype_does_not_round_the_gradient_norm(
    where: str, bf16_by_default: None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, clip=0.5, steps=1)
    norms = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(torch.float32)
        model = task.model()
        with spilled(model, where, tmp_path):
            optimizer = adamw(model, task)
            loss_of(model, next(task.batches())[0]).backward()
            torch.set_default_dtype(default)
            shown = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
            optimizer.step()
            norms.append((shown, optimizer.total_norm))
    assert norms[0] == norms[1]
