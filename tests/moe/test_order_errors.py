"""Calls in the wrong order raise an error that names the fix, and change nothing."""

import copy
import io
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overspill.core.errors import ConfigError, OrderError
from overspill.moe.settings import Settings
from tests.moe.oracle import (
    HOME_OR_NOT,
    SOME_AT_HOME,
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    delays,
    loss_of,
    losses_without,
    plain_run,
    spilled,
    train_step,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows

STREAMED = ["host with 2 slots", "host with 12 slots", "disk behind 3 host slots"]
TASK = Task(n_layers=2, steps=3)
CLIPPED = Task(n_layers=2, steps=3, clip=0.5)


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_a_second_backward_without_step_names_accumulate(where: str, tmp_path: Path) -> None:
    one, two, *rest = replace(TASK, steps=4).batches()
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


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_the_same_graph_twice_is_a_second_backward_too(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss = loss_of(model, next(TASK.batches())[0])
        loss.backward(retain_graph=True)
        with pytest.raises(OrderError, match="accumulate"):
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("where", slow_rows(STREAMED, 0, 1))
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


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_a_backward_without_optimizer_names_it(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        loss = loss_of(model, next(TASK.batches())[0])
        with pytest.raises(OrderError, match=r"overspill\.AdamW"):
            loss.backward()


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_zero_grad_after_an_update_during_backward_says_so(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss_of(model, next(TASK.batches())[0]).backward()
        with pytest.raises(OrderError, match="max_grad_norm"):
            optimizer.zero_grad()
        assert model.embedding.weight.grad is not None, "a step would update the experts alone"
        optimizer.step()


@pytest.mark.parametrize("where", SOME_AT_HOME)
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


@pytest.mark.parametrize(
    "where", slow_rows(["gpu", "host with 5 slots", "disk behind 3 host slots"], 0, 2)
)
def test_zero_grad_drops_what_was_accumulated(where: str, tmp_path: Path) -> None:
    task = Task(n_layers=2, steps=3, micro_batches=2)
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


@pytest.mark.parametrize("where", SOME_AT_HOME)
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


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_an_offloaded_model_can_be_neither_copied_nor_pickled(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, TASK)
        for thing in (model, model.blocks[0]):
            with pytest.raises(OrderError, match=r"cannot be copied.*load it a second time"):
                copy.deepcopy(thing)
            with pytest.raises(OrderError, match=r"cannot be pickled.*overspill\.save"):
                torch.save(thing, io.BytesIO())
        for function in (copy.deepcopy, pickle.dumps):
            with pytest.raises(OrderError, match="AdamW cannot be copied or pickled"):
                function(optimizer)
        with pytest.raises(OrderError, match="neither pickled nor copied"):
            copy.deepcopy(engine)
        # what the error advises
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file))


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_state_dicts_between_updates_during_backward_and_step_are_refused(
    where: str, tmp_path: Path
) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss_of(model, next(TASK.batches())[0]).backward()
        for thing in (model, optimizer):
            with pytest.raises(OrderError, match=r"cannot be saved .* opt\.step\(\)"):
                thing.state_dict()
        optimizer.step()
        assert model.state_dict().keys() == TASK.model().state_dict().keys()
        assert optimizer.state_dict()["state"]


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_state_dicts_between_backward_and_step_with_clipping_are_those_before(
    where: str, tmp_path: Path
) -> None:
    model = CLIPPED.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, CLIPPED)
        one, two, *_ = CLIPPED.batches()
        train_step(model, optimizer, one)
        weights, states = weights_of(model), optimizer.state_dict()["state"]
        loss_of(model, two[0]).backward()
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=weights))
        for number, entry in optimizer.state_dict()["state"].items():
            assert entry["step"] == 1
            assert torch.equal(entry["exp_avg"], states[number]["exp_avg"])
        optimizer.step()


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_weights_loaded_over_updates_during_backward_need_a_new_step(
    where: str, tmp_path: Path
) -> None:
    """step() would update the dense weights that were loaded, and not the experts."""
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        weights, states = weights_of(model), optimizer.state_dict()
        loss_of(model, next(TASK.batches())[0]).backward()
        model.load_state_dict(weights)
        with pytest.raises(OrderError, match="load the optimizer's state too"):
            optimizer.step()
        optimizer.load_state_dict(states)
        losses = [train_step(model, optimizer, batch) for batch in TASK.batches()]
    assert losses == pytest.approx(plain_run(TASK).losses, rel=1e-5)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_gradient_scaler_is_refused(clip: float | None, unscale: bool, tmp_path: Path) -> None:
    task = Task(steps=1, clip=clip)
    model = task.model()
    with spilled(model, "host with 2 slots", tmp_path, idle=False):
        optimizer = adamw(model, task)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(model, next(task.batches())[0])).backward()
        if unscale:
            scaler.unscale_(optimizer)
        with pytest.raises(ConfigError, match=r"GradScaler.*bfloat16.*enabled=False"):
            scaler.step(optimizer)


def test_a_gradient_scaler_that_is_not_enabled_changes_nothing(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path):
        optimizer = adamw(model, TASK)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        losses = []
        for (tokens,) in TASK.batches():
            loss = loss_of(model, tokens)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses == pytest.approx(plain_run(TASK).losses, rel=1e-5)


@pytest.mark.parametrize("where", slow_rows(STREAMED, 0, 1))
def test_a_forward_after_close_says_so(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path, idle=False) as engine:
        engine.close()
        with pytest.raises(OrderError, match="closed"):
            loss_of(model, next(TASK.batches())[0])


@pytest.mark.parametrize(
    ("where", "clip", "stepped"), all_pairs(HOME_OR_NOT, [None, 0.5], [False, True])
)
def test_gradients_of_other_tensors_after_the_update_are_refused(
    where: str, clip: float | None, stepped: bool, tmp_path: Path
) -> None:
    """They would be computed with other weights than their forward."""
    task = Task(n_layers=2, clip=clip)
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


@pytest.mark.parametrize("where", SOME_AT_HOME)
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


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_graph_from_before_step_is_refused_and_changes_nothing(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    """As in plain PyTorch, where step() changes what the graph has saved."""
    task = Task(n_layers=2, clip=clip)
    (tokens,) = next(task.batches())
    plain = task.model()
    early = loss_of(plain, tokens)
    loss_of(plain, tokens).backward()
    torch.optim.AdamW(plain.parameters()).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()

    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        early = loss_of(model, tokens)
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = weights_of(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=before))
        optimizer.zero_grad()
        train_step(model, optimizer, [tokens])


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_retained_graph_used_twice_is_refused_and_the_first_backward_counts(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=1, clip=clip)
    (tokens,) = next(task.batches())
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        loss = loss_of(model, tokens)
        loss.backward(retain_graph=True)
        dense = {
            parameter: parameter.grad.clone()
            for parameter in model.parameters()
            if parameter.grad is not None and not hasattr(parameter, "is_expert_placeholder")
        }
        with pytest.raises(OrderError, match="second backward"):
            loss.backward()
        for parameter, gradient in dense.items():  # without what was added until the error
            parameter.grad = gradient
        optimizer.step()
        found = Run([loss.item()], [], weights_of(model))
    assert_follows(found, replace(plain_run(task), norms=[]))


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_autograd_grad_of_experts_is_refused(where: str, tmp_path: Path) -> None:
    task = Task()
    model = task.model()
    with spilled(model, where, tmp_path):
        adamw(model, task)
        (tokens,) = next(task.batches())
        with pytest.raises(OrderError, match="leave their placeholders out"):
            torch.autograd.grad(loss_of(model, tokens), list(model.parameters()))


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_clipping_by_torch_is_refused(where: str, clip: float | None, tmp_path: Path) -> None:
    """It cannot scale the gradients of experts, and would scale the others alone."""
    task = Task(n_layers=2, clip=clip)
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        loss_of(model, next(task.batches())[0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(OrderError, match=r"give max_grad_norm to overspill\.AdamW"):
            optimizer.step()


@pytest.mark.parametrize(
    ("where", "clip", "by"),
    all_pairs(HOME_OR_NOT, [None, 0.5], ["optimizer", "model", "parameters"]),
)
def test_a_backward_after_step_needs_zero_grad(
    where: str, clip: float | None, by: str, tmp_path: Path
) -> None:
    """Plain PyTorch would add to the gradients of the last step."""
    task = Task(n_layers=2, steps=2, clip=clip)
    model = task.model()
    run = Run()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        for (tokens,) in task.batches():
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            run.losses.append(loss.item())
            with pytest.raises(OrderError, match=r"call opt.zero_grad\(\) after each step"):
                loss_of(model, tokens).backward()
            if by == "parameters":
                for parameter in model.parameters():
                    parameter.grad = None
            else:
                (optimizer if by == "optimizer" else model).zero_grad()
        run.weights = weights_of(model)
    assert_follows(run, replace(plain_run(task), norms=[]))
