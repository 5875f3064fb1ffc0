"""Parameter groups treat experts as those of the plain model, also groups that are added later."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.core.errors import ConfigError, OrderError
from overspill.models.gpt import GPTMoE
from tests.moe.oracle import (
    HOME_OR_NOT,
    SOME_AT_HOME,
    Run,
    Task,
    assert_follows,
    loss_of,
    spilled,
    weights_of,
)
from tests.pairs import all_pairs

Optimizer = Callable[..., torch.optim.Optimizer]


def experts_of(moe: nn.Module) -> list[nn.Parameter]:
    """The experts of a layer among the parameters, offloaded or not."""
    return [p for name, p in moe.named_parameters() if not name.startswith("router")]


def train(
    model: GPTMoE,
    optimizer: torch.optim.Optimizer,
    task: Task,
    between: Callable[[int], None] = lambda step: None,
) -> Run:
    """The loop of any optimizer; `between` is called before each step."""
    run = Run()
    for step, (tokens,) in enumerate(task.batches()):
        between(step)
        loss = loss_of(model, tokens)
        loss.backward()
        if task.clip is not None and not isinstance(optimizer, overspill.AdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights = weights_of(model)
    return run


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_groups_by_dimension_decay_experts_as_in_the_plain_model(
    where: str, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=2)

    def decaying(model: GPTMoE) -> list[dict[str, Any]]:
        """The usual recipe: matrices decay, vectors do not."""
        return [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 5.0},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]

    plain, model = task.model(), task.model()
    expected = train(plain, torch.optim.AdamW(decaying(plain), lr=task.lr), task)
    with spilled(model, where, tmp_path):
        run = train(model, overspill.AdamW(decaying(model), lr=task.lr), task)
    assert_follows(run, expected)


@pytest.mark.parametrize(("where", "clip", "at_first"), all_pairs(HOME_OR_NOT, [None, 0.5], [0, 1]))
def test_experts_that_are_unfrozen_later_learn_from_then_on(
    where: str, clip: float | None, at_first: int, tmp_path: Path
) -> None:
    """Of three layers, `at_first` are trained from the beginning."""
    task = Task(steps=3, clip=clip)

    def run(model: GPTMoE, make: Optimizer, **options: Any) -> Run:
        layers = model.moe_layers()
        later = [p for moe in layers[at_first:] for p in experts_of(moe)]
        for parameter in later:
            parameter.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = make(trained, lr=task.lr, **options)

        def unfreeze(step: int) -> None:
            if step == 1:
                for parameter in later:
                    parameter.requires_grad_(True)
                optimizer.add_param_group({"params": later, "lr": 3 * task.lr, "weight_decay": 1.0})

        return train(model, optimizer, task, unfreeze)

    expected = run(task.model(), torch.optim.AdamW)
    model = task.model()
    with spilled(model, where, tmp_path):
        got = run(model, overspill.AdamW, max_grad_norm=clip)
    assert_follows(got, expected)


def test_experts_cannot_be_added_between_their_backward_and_step(tmp_path: Path) -> None:
    """Their gradients were not computed, since no optimizer wanted them."""
    task = Task(n_layers=3, steps=2)
    model = task.model()
    with spilled(model, "host with 2 slots", tmp_path):
        above = model.moe_layers()[2]
        mine = [p for p in model.parameters() if not any(p is e for e in experts_of(above))]
        optimizer = overspill.AdamW(mine, lr=task.lr)
        one, two = (tokens for (tokens,) in task.batches())
        loss_of(model, one).backward()
        with pytest.raises(OrderError, match=r"layer 2 .* after step\(\)"):
            optimizer.add_param_group({"params": experts_of(above)})
        assert len(optimizer.param_groups) == 1
        optimizer.step()
        optimizer.zero_grad()
        optimizer.add_param_group({"params": experts_of(above)})
        before = weights_of(model)
        loss_of(model, two).backward()
        optimizer.step()
        after = weights_of(model)
        for layer in range(3):
            name = f"blocks.{layer}.moe.w_in"
            assert not torch.equal(after[name], before[name]), name


def test_experts_cannot_be_added_twice_or_from_another_model(tmp_path: Path) -> None:
    task = Task(n_layers=1)
    model, other = task.model(), task.model()
    overspill.offload(other, device="cpu", mode="gpu", quiet=True)
    with spilled(model, "gpu", tmp_path):
        optimizer = overspill.AdamW(model, lr=task.lr)
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": experts_of(model.moe_layers()[0])})
        with pytest.raises(ConfigError, match="one AdamW per model"):
            optimizer.add_param_group({"params": list(other.parameters())})
        assert len(optimizer.param_groups) == 1
        overspill.AdamW(other, lr=task.lr)  # which has no optimizer yet
    other.overspill.close()


def test_a_second_optimizer_does_not_get_experts_of_the_first(tmp_path: Path) -> None:
    task = Task(n_layers=1, steps=1)
    model = task.model()
    with spilled(model, "gpu", tmp_path):
        first = overspill.AdamW(model, lr=task.lr)
        second = overspill.AdamW([nn.Parameter(torch.ones(2))])
        with pytest.raises(OrderError, match="has an optimizer already"):
            second.add_param_group({"params": experts_of(model.moe_layers()[0])})
        assert len(second.param_groups) == 1
        second.step()  # still an optimizer of its own parameters
        (tokens,) = next(task.batches())
        loss_of(model, tokens).backward()
        first.step()


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_another_variant_that_a_group_asks_for_later_updates_no_expert(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=1, clip=clip)
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = overspill.AdamW(model, lr=task.lr, max_grad_norm=clip)
        before = weights_of(model)
        optimizer.param_groups[0]["maximize"] = True

        def one_step() -> None:
            loss_of(model, next(task.batches())[0]).backward()
            optimizer.step()

        with pytest.raises(ConfigError, match="maximize=True is not supported"):
            one_step()
        assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
        optimizer.param_groups[0]["maximize"] = False
        optimizer.zero_grad()
        one_step()
        after = weights_of(model)
        assert not any(torch.equal(after[name], value) for name, value in before.items())
