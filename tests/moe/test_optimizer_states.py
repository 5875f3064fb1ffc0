"""`load_state_dict` of the optimizer restores what torch.optim.AdamW would, in all dtypes."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from overspill.core.errors import ConfigError
from tests.moe.oracle import (
    HOME_OR_NOT,
    Task,
    adamw,
    assert_same_bits,
    loss_of,
    spilled,
    train,
    train_step,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = list(product((FP32, BF16), repeat=2))


@pytest.mark.parametrize(
    ("where", "clip", "dtype", "steps"),
    all_pairs(HOME_OR_NOT, [None, 0.5], [FP32, BF16], [0, 1]),
    ids=str,
)
def test_a_state_from_earlier_in_the_run_is_restored_to_the_bit(
    where: str, clip: float | None, dtype: torch.dtype, steps: int, tmp_path: Path
) -> None:
    """Also the state before the first step, in which there are no moments yet."""
    task = Task(n_layers=2, steps=2, clip=clip, dtype=dtype)
    batches = list(task.batches())
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        for batch in batches[:steps]:
            train_step(model, optimizer, batch)
        weights, states = weights_of(model), optimizer.state_dict()
        once = train(model, optimizer, task, first=steps)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        assert optimizer.steps_taken == steps
        again = train(model, optimizer, task, first=steps)
    assert_same_bits(again, once)


@pytest.mark.parametrize("where", HOME_OR_NOT)
def test_the_first_state_is_restored_after_a_backward_without_step(
    where: str, tmp_path: Path
) -> None:
    """Experts were updated during backward, and no step was counted."""
    task = Task(n_layers=2, steps=2)
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        weights, states = weights_of(model), optimizer.state_dict()
        loss_of(model, next(task.batches())[0]).backward()
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        assert all(p.grad is None for p in model.parameters()), "the step was dropped as a whole"
        run = train(model, optimizer, task)
    model = task.model()
    with spilled(model, where, tmp_path):
        expected = train(model, adamw(model, task), task)
    assert_same_bits(run, expected)


@pytest.mark.parametrize(
    ("where", "source", "target"),
    slow_rows(
        all_pairs(
            HOME_OR_NOT, DTYPES, DTYPES, allowed=lambda where, source, target: source != target
        ),
        *(1, 2, 4, 7, 10, 11),
    ),
    ids=str,
)
def test_moments_are_converted_to_the_dtype_of_the_optimizer(
    where: str,
    source: tuple[torch.dtype, torch.dtype],
    target: tuple[torch.dtype, torch.dtype],
    tmp_path: Path,
) -> None:
    """Each is the dtype of the model and that of the moments."""
    task = Task(n_layers=1, steps=2, dtype=source[0])
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task, state_dtype=source[1])
        train(model, optimizer, task)
        given = optimizer.state_dict()
    task = replace(task, dtype=target[0])
    model = task.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task, state_dtype=target[1])
        optimizer.load_state_dict(given)
        loaded = optimizer.state_dict()
        assert loaded["state"].keys() == given["state"].keys()
        for number, entry in loaded["state"].items():
            saved = given["state"][number]
            assert entry["step"] == 2
            for name in ("exp_avg", "exp_avg_sq"):
                assert entry[name].dtype == target[1]
                assert torch.equal(entry[name], saved[name].to(target[1])), (number, name)
            if "low" in entry and "low" not in saved:
                assert not entry["low"].any(), "the master is the weight itself"
            assert ("low" in entry) == (target[0] == BF16)
        train(model, optimizer, task)
        assert optimizer.steps_taken == 4


def test_a_state_that_is_not_of_this_model_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    task = Task(n_layers=1, steps=1)
    model = task.model()
    with spilled(model, "host with 2 slots", tmp_path):
        optimizer = adamw(model, task)
        train(model, optimizer, task)
        good = optimizer.state_dict()
        for number, entry in good["state"].items():
            for wrong in ({"momentum_buffer": torch.ones(3)}, {**entry, "exp_avg": torch.ones(3)}):
                state = {**good["state"], number: wrong}
                with pytest.raises(ConfigError, match=rf"parameter {number} .* exp_avg"):
                    optimizer.load_state_dict({**good, "state": state})
        with pytest.raises(ConfigError, match="parameter groups"):
            optimizer.load_state_dict({**good, "param_groups": good["param_groups"] * 2})
        groups = [{**group, "amsgrad": True} for group in good["param_groups"]]
        with pytest.raises(ConfigError, match="amsgrad"):
            optimizer.load_state_dict({**good, "param_groups": groups})
        after = optimizer.state_dict()
        for number, entry in good["state"].items():
            assert torch.equal(after["state"][number]["exp_avg"], entry["exp_avg"])


def test_groups_are_replaced_by_the_saved_ones(tmp_path: Path) -> None:
    """As in torch: what a scheduler has added since is gone."""
    task = Task(n_layers=1, steps=1)
    model = task.model()
    with spilled(model, "gpu", tmp_path):
        optimizer = adamw(model, task)
        states = optimizer.state_dict()
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
        assert "initial_lr" in optimizer.param_groups[0]
        optimizer.load_state_dict(states)
        assert "initial_lr" not in optimizer.param_groups[0]
        assert optimizer.param_groups[0]["lr"] == task.lr
        train(model, optimizer, task)
