"""Gradients of resident and streamed experts: a failure in one sink changes no other expert."""

from pathlib import Path

import pytest
import torch

from overspill.core.errors import NonFiniteError
from overspill.moe.settings import Settings
from tests.moe.oracle import Task, adamw, loss_of, spilled, train_step, weights_of


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("counts", [[0, 5, 5], [5, 0, 0]], ids=["streamed", "resident"])
def test_nan_in_one_sink_is_raised_before_experts_of_any_are_updated(
    counts: list[int], micro_batches: int, tmp_path: Path
) -> None:
    """With gradients that are kept until step(), and no norm that would find it."""
    task = Task(n_layers=3)
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, "host with 5 slots", tmp_path, Settings(overlap_updates=False)) as engine:
        optimizer = adamw(model, task)
        engine.set_residents(counts)
        train_step(model, optimizer, [tokens])
        before = weights_of(model)
        # the gradient of the lowest block alone becomes NaN
        hook = model.blocks[0].register_full_backward_pre_hook(
            lambda _, grads: tuple(None if g is None else g * float("nan") for g in grads)
        )
        with optimizer.accumulate():
            for _ in range(micro_batches - 1):
                loss_of(model, tokens).backward()
        loss_of(model, tokens).backward()
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            optimizer.step()
        hook.remove()
        for name, weight in weights_of(model).items():
            assert torch.equal(weight, before[name]), name
        optimizer.zero_grad()
        train_step(model, optimizer, [tokens])  # training goes on
