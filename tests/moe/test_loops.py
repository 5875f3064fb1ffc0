"""Loops that are not one forward, one backward and one step are exact too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overspill.core.errors import OrderError
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
    streamed_run,
    train_step,
    weights_of,
)


@pytest.mark.parametrize("where", [*HOME_OR_NOT, "host with 12 slots"])
def test_evaluation_between_steps_changes_no_bit(where: str, tmp_path: Path) -> None:
    task = Task(steps=2)
    model, run = task.model(), Run()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        for batches in task.batches():
            with torch.no_grad():
                before = loss_of(model, batches[0]).item()
            run.losses.append(train_step(model, optimizer, batches))
            assert before == run.losses[-1]
            model.eval()
            with torch.no_grad():
                # other tokens, so that other experts are uploaded than training will need
                model(torch.zeros(1, 4, dtype=torch.long))
            model.train()
        run.weights = weights_of(model)
    assert_same_bits(run, streamed_run(task))


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_graph_that_is_freed_without_backward_changes_nothing(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=2, clip=clip)
    model, run = task.model(), Run()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        for batches in task.batches():
            discarded = loss_of(model, batches[0].flip(1))
            assert discarded.requires_grad
            del discarded
            kept_alive = loss_of(model, batches[0].flip(0))  # alive during the backward
            run.losses.append(train_step(model, optimizer, batches))
            del kept_alive
        run.weights = weights_of(model)
    # norms are compared by the losses they lead to
    assert_follows(run, replace(plain_run(task), norms=[]))


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("freed", [False, True])
def test_experts_are_updated_during_backward_once_no_other_graph_is_alive(
    where: str, freed: bool, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=1)
    model = task.model()
    (tokens,) = next(task.batches())
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        other = loss_of(model, tokens)
        if freed:
            del other
        loss_of(model, tokens).backward()
        if freed:
            with pytest.raises(OrderError, match="updated during backward"):
                optimizer.zero_grad()
            optimizer.step()
        else:
            optimizer.zero_grad()  # the gradients wait for the other graph
            del other


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_every_backward_may_be_under_accumulate(where: str, tmp_path: Path) -> None:
    task = Task(n_layers=2, micro_batches=2, steps=2)
    model, run = task.model(), Run()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        for batches in task.batches():
            losses = []
            for tokens in batches:
                with optimizer.accumulate():
                    loss = loss_of(model, tokens) / 2
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(sum(losses))
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_micro_batches_grouped_in_one_pass_learn_as_accumulated_ones(
    where: str, tmp_path: Path
) -> None:
    task = Task(n_layers=2, micro_batches=3, steps=2, clip=0.5)
    model, run = task.model(), Run()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        for batches in task.batches():
            tokens = torch.cat(batches)
            loss = model(tokens[:, :-1], tokens[:, 1:], pieces=3).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
        run.weights = weights_of(model)
    assert_follows(run, replace(plain_run(task), norms=[]))


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_of_other_tensors_leave_the_experts_alone(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    """`autograd.grad` and `backward(inputs=...)` name what they want gradients of."""
    task = Task(n_layers=2, steps=2, clip=clip)
    model, run = task.model(), Run()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        for batches in task.batches():
            loss = loss_of(model, batches[0])
            (gradient,) = torch.autograd.grad(loss, [model.embedding.weight])
            loss_of(model, batches[0]).backward(inputs=[model.embedding.weight])
            torch.testing.assert_close(gradient, model.embedding.weight.grad)
            twin = task.model()
            twin.load_state_dict(weights_of(model))
            (expected_gradient,) = torch.autograd.grad(
                loss_of(twin, batches[0]), [twin.embedding.weight]
            )
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-5)
            optimizer.zero_grad()
            run.losses.append(train_step(model, optimizer, batches))
        run.weights = weights_of(model)
    plain = plain_run(task)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, expected in plain.weights.items():
        torch.testing.assert_close(run.weights[name], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_experts_frozen_between_forward_and_backward_get_no_gradient(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task = Task(steps=1, clip=clip, n_layers=2)
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        before = weights_of(model)
        loss = loss_of(model, next(task.batches())[0])
        model.moe_layers()[0].experts.requires_grad_(False)
        loss.backward()
        optimizer.step()
        after = weights_of(model)
    assert torch.equal(after["blocks.0.moe.w_in"], before["blocks.0.moe.w_in"])
    assert not torch.equal(after["blocks.1.moe.w_in"], before["blocks.1.moe.w_in"])


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_a_second_derivative_is_refused(where: str, tmp_path: Path) -> None:
    task = Task(steps=1)
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)  # noqa: F841  # the experts need one
        x = torch.randn(1, 6, 16, requires_grad=True)
        y, _ = model.moe_layers()[0](x)
        (gradient,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward()
