"""Calls in the wrong order raise an error that names the fix, and change nothing."""

import copy
from pathlib import Path

import pytest
import torch

from overspill.core.errors import OrderError
from overspill.moe.settings import Settings
from tests.moe.oracle import (
    ONE_OF_EACH,
    Run,
    Task,
    adamw,
    assert_same_bits,
    delays,
    loss_of,
    losses_without,
    spilled,
    train_step,
    weights_of,
)

STREAMED = ["host with 2 slots", "host with 12 slots", "disk behind 3 host slots"]
TASK = Task(steps=4)
CLIPPED = Task(steps=4, clip=0.5)


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_a_second_backward_without_step_names_accumulate(where: str, tmp_path: Path) -> None:
    one, two, *rest = TASK.batches()
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss_of(model, one[0]).backward()
        with pytest.raises(OrderError, match=r"opt\.accumulate\(\)"):
            loss_of(model, two[0]).backward()
        # after step() training continues
        optimizer.step()
        optimizer.zero_grad()
        losses = [train_step(model, optimizer, batch) for batch in rest]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_the_same_graph_twice_is_a_second_backward_too(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss = loss_of(model, next(TASK.batches())[0])
        loss.backward(retain_graph=True)
        with pytest.raises(OrderError, match="accumulate"):
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("where", STREAMED)
def test_a_forward_before_step_with_clipping_says_so(where: str, tmp_path: Path) -> None:
    one, two, *_ = CLIPPED.batches()
    model = CLIPPED.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, CLIPPED)
        loss_of(model, one[0]).backward()
        with pytest.raises(OrderError, match=r"opt\.step\(\)"):
            loss_of(model, two[0])
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss_of(model, two[0]))


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_a_backward_without_optimizer_names_it(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        loss = loss_of(model, next(TASK.batches())[0])
        with pytest.raises(OrderError, match=r"overspill\.AdamW"):
            loss.backward()


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_zero_grad_after_an_update_during_backward_says_so(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss_of(model, next(TASK.batches())[0]).backward()
        with pytest.raises(OrderError, match="max_grad_norm"):
            optimizer.zero_grad()
        assert model.embedding.weight.grad is not None, "a step would update the experts alone"
        optimizer.step()


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_zero_grad_with_clipping_drops_the_batch(where: str, tmp_path: Path) -> None:
    expected = losses_without(CLIPPED, where, tmp_path, skip=1)
    model, losses = CLIPPED.model(), []
    with spilled(model, where, tmp_path, Settings(inject=delays(seed=4))):
        optimizer = adamw(model, CLIPPED)
        for number, batch in enumerate(CLIPPED.batches()):
            if number == 1:
                loss_of(model, batch[0]).backward()
                optimizer.zero_grad()
            else:
                losses.append(train_step(model, optimizer, batch))
    assert losses == expected


@pytest.mark.parametrize("where", ["gpu", "host with 5 slots", "disk behind 3 host slots"])
def test_zero_grad_drops_what_was_accumulated(where: str, tmp_path: Path) -> None:
    task = Task(steps=4, micro_batches=3)
    expected = losses_without(task, where, tmp_path, skip=1)
    model, losses = task.model(), []
    slow = Settings(inject=delays(seed=5, longest=0.01, only="optimizer"))
    with spilled(model, where, tmp_path, slow):
        optimizer = adamw(model, task)
        for number, batch in enumerate(task.batches()):
            if number == 1:
                for tokens in batch:
                    with optimizer.accumulate():
                        loss_of(model, tokens).backward()
                optimizer.zero_grad()  # while some of it is still being accumulated
            else:
                losses.append(train_step(model, optimizer, batch))
    assert losses == expected


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_a_learning_rate_set_between_backward_and_step_is_not_ignored(
    where: str, tmp_path: Path
) -> None:
    model, clipped = TASK.model(), CLIPPED.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss_of(model, next(TASK.batches())[0]).backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(OrderError, match="after step"):
            optimizer.step()  # the experts were updated at the old rate
        optimizer.param_groups[0]["lr"] = TASK.lr
        optimizer.step()
    with spilled(clipped, where, tmp_path):
        optimizer = adamw(clipped, CLIPPED)
        before = weights_of(clipped)
        loss_of(clipped, next(TASK.batches())[0]).backward()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()  # with clipping they are updated here, at the new one
        assert_same_bits(Run(weights=weights_of(clipped)), Run(weights=before))


def test_accumulate_ends_with_its_block_also_on_an_error(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path):
        optimizer = adamw(model, TASK)
        with pytest.raises(KeyError), optimizer.accumulate():
            raise KeyError
        assert not optimizer.accumulating


def test_an_offloaded_model_cannot_be_copied(tmp_path: Path) -> None:
    model = TASK.model()
    with (
        spilled(model, "host with 2 slots", tmp_path),
        pytest.raises(OrderError, match="cannot be copied"),
    ):
        copy.deepcopy(model)


@pytest.mark.parametrize("where", STREAMED)
def test_a_forward_after_close_says_so(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path, idle=False) as engine:
        engine.close()
        with pytest.raises(OrderError, match="closed"):
            loss_of(model, next(TASK.batches())[0])


@pytest.mark.parametrize("where", ONE_OF_EACH)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("stepped", [False, True])
def test_gradients_of_other_tensors_after_the_update_are_refused(
    where: str, clip: float | None, stepped: bool, tmp_path: Path
) -> None:
    """They would be computed with other weights than their forward."""
    task = Task(clip=clip)
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        (tokens,) = next(task.batches())
        loss = loss_of(model, tokens)
        loss.backward(retain_graph=True)
        if stepped:
            optimizer.step()
        # after step() autograd itself notices that dense weights have changed
        names = "modified by an inplace operation" if stepped else "second backward before step"
        with pytest.raises(RuntimeError, match=names):
            torch.autograd.grad(loss, [model.embedding.weight])
        if not stepped:
            optimizer.step()


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_a_graph_from_before_step_is_refused_also_with_frozen_experts(
    where: str, tmp_path: Path
) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        for layer in model.moe_layers():
            layer.experts.requires_grad_(False)
        optimizer = adamw(model, TASK)
        one, two, *_ = TASK.batches()
        before = loss_of(model, one[0])
        train_step(model, optimizer, two)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()


def test_autograd_grad_of_experts_is_refused(tmp_path: Path) -> None:
    task = Task()
    model = task.model()
    with spilled(model, "gpu", tmp_path):
        adamw(model, task)
        (tokens,) = next(task.batches())
        with pytest.raises(OrderError, match="leave their placeholders out"):
            torch.autograd.grad(loss_of(model, tokens), list(model.parameters()))
