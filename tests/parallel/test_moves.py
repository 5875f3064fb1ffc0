"""Each rank moves its own experts, and the others do not notice."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.plan.usage import Swap
from tests.moe.oracle import Task, loss_of
from tests.parallel.processes import run_ranks
from tests.parallel.training import Case, assert_follows, offload, plain, train_rank

TASK = Task(n_layers=2, lr=1e-3, steps=3, clip=0.5)


def train_moving(mesh: DeviceMesh, case: Case) -> Any:
    def move(engine: Any, step: int) -> None:
        if mesh.get_local_rank() == 0:
            engine.set_residents([step % 3, (step + 1) % 3])

    return train_rank(mesh, case, before_step=move)


@pytest.mark.slow
def test_residents_that_change_on_one_rank_do_not_change_training() -> None:
    case = Case(TASK)
    assert_follows(run_ranks(2, train_moving, case), plain(case))


def logits_after_a_swap(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Those of frozen experts, of which two of rank 0 were swapped; and of plain ones."""
    model, rank = TASK.model(), mesh.get_local_rank()
    tokens = torch.arange(24).view(2, 12) + rank
    want = model(tokens).logits
    for moe in model.moe_layers():
        for parameter in moe.expert_parameters():
            parameter.requires_grad_(False)
    offload(model, mesh, gpu_experts=2)
    optimizer = overspill.AdamW(model)
    loss = loss_of(model, tokens)
    if rank == 0:
        engine: Any = model.overspill
        engine.swap_experts([Swap(layer, 0, 2) for layer in range(2)])
    loss.backward()  # orders the received rows anew
    optimizer.zero_grad()
    return model(tokens).logits.detach(), want.detach()


def test_frozen_experts_of_a_rank_are_swapped() -> None:
    for got, want in run_ranks(2, logits_after_a_swap):
        torch.testing.assert_close(got, want)
