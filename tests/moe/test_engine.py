"""What an engine tells of the step it is in."""

from pathlib import Path

import pytest
import torch
from torch import nn

from overspill.core.errors import OrderError
from overspill.moe.streaming.engine import StreamingEngine
from tests.moe.oracle import Task, adamw, loss_of, spilled

TASK = Task(n_layers=2, clip=0.5, micro_batches=2)
PLACES = ["gpu", "host with 2 slots", "disk behind 3 host slots"]


def norm(model: nn.Module) -> float:
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))


@pytest.mark.parametrize("where", PLACES)
def test_the_norm_over_all_parameters_is_that_of_the_plain_model(
    where: str, tmp_path: Path
) -> None:
    plain, model = TASK.model(), TASK.model()
    first, last = next(TASK.batches())
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        for twin in (plain, model):
            with optimizer.accumulate():
                loss_of(twin, first).backward()
            loss_of(twin, last).backward()
        expected = norm(plain)
        assert norm(model) == pytest.approx(expected, rel=1e-5)
        optimizer.step()
        assert optimizer.total_norm == pytest.approx(expected, rel=1e-5)  # told, not counted twice
        assert all(
            p.grad is None for p in model.parameters() if hasattr(p, "is_expert_placeholder")
        )


def test_gradients_of_experts_cannot_be_set(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "gpu", tmp_path):
        placeholder = next(p for p in model.parameters() if hasattr(p, "is_expert_placeholder"))
        placeholder.grad = None  # what zero_grad does
        with pytest.raises(OrderError, match="cannot be set"):
            placeholder.grad = torch.zeros(0)


def test_a_saved_folder_holds_the_weights_until_the_next_step(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path) as engine:
        optimizer = adamw(model, TASK)
        engine.saved_to = tmp_path
        loss_of(model, next(TASK.batches())[0]).backward()
        assert engine.saved_to == tmp_path
        optimizer.step()
        assert engine.saved_to is None


@pytest.mark.parametrize("where", PLACES)
def test_closed_it_gives_its_memory_back(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path, idle=False) as engine:
        optimizer = adamw(model, TASK)
        loss_of(model, next(TASK.batches())[0]).backward()
        optimizer.step()
        engine.close()
        if isinstance(engine, StreamingEngine):
            assert engine.gradients.ring is not None
            slabs = [*engine.store.slabs.values(), engine.gradients.ring.buffers]
            kept = [*(slab.rows for slab in slabs), engine.loader.slab, engine._waves._slot_weights]
        else:
            assert engine.grads is None
            kept = [engine.weights, *engine.states.values()]
        assert [tensor.untyped_storage().nbytes() for tensor in kept] == [0] * len(kept)
