"""The optimizer over dense parameters and experts is torch.optim.AdamW with clipping."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.models.gpt import GPTMoE
from tests.moe.oracle import (
    ONE_OF_EACH,
    STARVED,
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    loss_of,
    plain_run,
    spilled,
    spilled_run,
    train,
    train_step,
    weights_of,
)
from tests.slow import slow_rows


def test_an_expert_without_tokens_only_decays(tmp_path: Path) -> None:
    task = Task(n_layers=3, starve=True, weight_decay=3.0, steps=2)
    before = weights_of(task.model())
    run = spilled_run(task, "host with 2 slots", tmp_path)
    left = (1 - task.lr * task.weight_decay) ** task.steps
    for name in ("blocks.0.moe.w_in", "blocks.2.moe.w_out"):
        torch.testing.assert_close(run.weights[name][STARVED], before[name][STARVED] * left)


everywhere = pytest.mark.parametrize(
    ("where", "clip"),
    slow_rows(
        [("gpu", 0.5), ("host with 2 slots", None), *product(["disk, 5 resident"], [None, 0.5])], 2
    ),
)


@pytest.mark.parametrize("where", slow_rows(ONE_OF_EACH, 1))
def test_the_norm_is_that_of_all_gradients_dense_and_experts(where: str, tmp_path: Path) -> None:
    task = Task(clip=1e-3, steps=2, micro_batches=2)  # every gradient is clipped
    run = spilled_run(task, where, tmp_path)
    assert run.norms == pytest.approx(plain_run(task).norms, rel=1e-5)
    assert min(run.norms) > task.clip


def _groups(model: GPTMoE, lr: float) -> list[dict[str, Any]]:
    """Each block its own learning rate, weight decay and betas."""
    blocks = [
        {
            "params": list(block.parameters()),
            "lr": lr * (number + 1),
            "weight_decay": 0.2 * number,
            "betas": (0.9 - 0.1 * number, 0.99),
        }
        for number, block in enumerate(model.blocks)
    ]
    return [*blocks, {"params": [model.embedding.weight, model.norm.weight], "lr": lr}]


@everywhere
def test_parameter_groups_and_schedulers_reach_every_layer(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task = Task(steps=2, clip=clip)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    plain = task.model()
    torch_optimizer = torch.optim.AdamW(_groups(plain, task.lr))
    scheduler, expected = schedule(torch_optimizer), Run()
    for (tokens,) in task.batches():
        loss = loss_of(plain, tokens)
        loss.backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            expected.norms.append(norm.item())
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        scheduler.step()
        expected.losses.append(loss.item())
    expected.weights = weights_of(plain)

    model, run = task.model(), Run()
    with spilled(model, where, tmp_path):
        optimizer = overspill.AdamW(_groups(model, task.lr), max_grad_norm=clip)
        scheduler = schedule(optimizer)
        for batches in task.batches():
            run.losses.append(train_step(model, optimizer, batches))
            if optimizer.total_norm is not None:
                run.norms.append(optimizer.total_norm)
            scheduler.step()
        run.weights = weights_of(model)
    assert_follows(run, expected)


@everywhere
def test_a_run_continues_from_its_state_dicts_to_the_bit(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=2, clip=clip)
    model = task.model()
    with spilled(model, where, tmp_path):
        whole = train(model, adamw(model, task), task)

    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        train_step(model, optimizer, next(task.batches()))
        weights, states = model.state_dict(), optimizer.state_dict()

    other = GPTMoE(task.config, checkpoint=False, seed=99)
    with spilled(other, where, tmp_path):
        optimizer = adamw(other, task, lr=123.0)
        other.load_state_dict(weights)
        optimizer.load_state_dict(states)
        rest = train(other, optimizer, task, first=1)
    assert_same_bits(Run(whole.losses[:1] + rest.losses, [], rest.weights), whole)


def test_a_bf16_run_continues_in_another_mode_to_the_bit(tmp_path: Path) -> None:
    task = Task(n_layers=2, dtype=torch.bfloat16, steps=2, clip=0.5)
    model = task.model()
    with spilled(model, "disk behind 3 host slots", tmp_path):
        whole = train(model, adamw(model, task, state_dtype=torch.bfloat16), task)
    model = task.model()
    with spilled(model, "disk behind 3 host slots", tmp_path):
        optimizer = adamw(model, task, state_dtype=torch.bfloat16)
        train_step(model, optimizer, next(task.batches()))
        weights, states = model.state_dict(), optimizer.state_dict()
    model = task.model()
    with spilled(model, "host with 5 slots", tmp_path):
        optimizer = adamw(model, task, state_dtype=torch.bfloat16)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        rest = train(model, optimizer, task, first=1)
    assert_same_bits(Run(whole.losses[:1] + rest.losses, [], rest.weights), whole)


def test_loading_does_not_change_the_given_state_dicts(tmp_path: Path) -> None:
    task = Task(steps=2)
    model = task.model()
    with spilled(model, "host with 2 slots", tmp_path):
        optimizer = adamw(model, task)
        train(model, optimizer, task)
        weights, states = weights_of(model), optimizer.state_dict()
        copy = {name: value.clone() for name, value in weights.items()}
        moments = [state["exp_avg"].clone() for state in states["state"].values()]
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        train(model, optimizer, task)
        assert weights.keys() == copy.keys()
        assert all(torch.equal(weights[name], value) for name, value in copy.items())
        for state, before in zip(states["state"].values(), moments, strict=True):
            assert torch.equal(state["exp_avg"], before)


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_frozen_experts_do_not_change_and_the_rest_learns(where: str, tmp_path: Path) -> None:
    task = Task(n_layers=3, steps=2, clip=0.5)
    plain = task.model()
    for moe in plain.moe_layers()[1:]:
        moe.w_in.requires_grad_(False)
        moe.w_out.requires_grad_(False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    expected = Run()
    for (tokens,) in task.batches():
        loss = loss_of(plain, tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.losses.append(loss.item())
        expected.norms.append(norm.item())
    expected.weights = weights_of(plain)

    model = task.model()
    frozen_before, frozen_after = model.moe_layers()[1:]
    for parameter in frozen_before.expert_parameters():
        parameter.requires_grad_(False)
    with spilled(model, where, tmp_path):
        frozen_after.experts.requires_grad_(False)
        run = train(model, adamw(model, task), task)
    assert_follows(run, expected)
