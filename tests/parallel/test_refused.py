"""What ranks cannot do together raises one error on all of them, and leaves the models usable."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overspill
from overspill.core.errors import BudgetError, ConfigError, NonFiniteError, RankError
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from overspill.parallel.ranks import Ranks
from tests.moe.oracle import Task, loss_of
from tests.parallel.processes import run_ranks
from tests.parallel.training import offload

Raised = dict[str, tuple[Any, Any]]

TASK = Task(n_layers=1)
TOKENS = torch.arange(24).view(2, 12)


def step(model: GPTMoE, optimizer: overspill.AdamW, factor: float = 1.0) -> None:
    (factor * loss_of(model, TOKENS)).backward()
    optimizer.step()
    optimizer.zero_grad()


def errors(mesh: DeviceMesh, attempts: list[Callable[[DeviceMesh, bool], None]]) -> list[Any]:
    """What each attempt raises; `True` is given to it on rank 1. After all, a step works."""
    found: list[Any] = []
    for attempt in attempts:
        try:
            attempt(mesh, mesh.get_local_rank() == 1)
        except Exception as error:
            found.append(error)
        else:
            found.append(None)
    model = TASK.model()
    offload(model, mesh)
    step(model, overspill.AdamW(model))
    return found


def other_config(mesh: DeviceMesh, odd: bool) -> None:
    offload(Task(n_layers=1, top_k=1 if odd else 2).model(), mesh)


def other_seed(mesh: DeviceMesh, odd: bool) -> None:
    offload(GPTMoE(TASK.config, seed=int(odd)), mesh)


def other_activations(mesh: DeviceMesh, odd: bool) -> None:
    kept = Settings(activations="keep" if odd else "recompute")
    offload(TASK.model(), mesh, settings=kept)


def test_ranks_with_different_models_are_refused_on_all(raised: Raised) -> None:
    cases = {
        other_config: "config.top_k",
        other_seed: "dense weights",
        other_activations: "activations",
    }
    for attempt, what in cases.items():
        for error in raised[attempt.__name__]:
            assert isinstance(error, ConfigError)
            assert what in str(error)
            assert "rank 0 has" in str(error)


def small_budget(mesh: DeviceMesh, odd: bool) -> None:
    model = TASK.model()
    budget = {"host_memory": "1KiB"} if odd else {}
    try:
        offload(model, mesh, **budget)
    finally:
        assert not hasattr(model, "overspill")
        loss_of(model, TOKENS).backward()  # it is the plain model


def test_a_failure_of_one_rank_ends_offload_on_all_and_leaves_plain_models(
    raised: Raised,
) -> None:
    other, own = raised["small_budget"]
    assert isinstance(own, BudgetError)
    assert "sizes of one rank: each of 2 has an equal part of --host-memory" in str(own)
    assert isinstance(other, RankError)
    assert "offloading the model failed on rank 1: BudgetError" in str(other)
    assert str(own) in str(other)


def not_finite(mesh: DeviceMesh, odd: bool) -> None:
    model = TASK.model()
    offload(model, mesh)
    optimizer = overspill.AdamW(model, max_grad_norm=1.0)
    before = model.embedding.weight.clone()
    try:
        step(model, optimizer, float("nan") if odd else 1.0)
    except NonFiniteError:
        assert torch.equal(model.embedding.weight, before)
        optimizer.zero_grad()
        step(model, optimizer)  # the next batch
        raise


def other_learning_rate(mesh: DeviceMesh, odd: bool) -> None:
    model = TASK.model()
    offload(model, mesh)
    step(model, overspill.AdamW(model, lr=1e-3 if odd else 1e-4, max_grad_norm=1.0))


def test_a_loss_that_is_not_finite_skips_the_step_of_all_ranks(raised: Raised) -> None:
    assert [type(error) for error in raised["not_finite"]] == [NonFiniteError] * 2


def test_different_learning_rates_are_refused(raised: Raised) -> None:
    for error in raised["other_learning_rate"]:
        assert isinstance(error, ConfigError)
        assert "learning rate" in str(error)


def in_evaluation(mesh: DeviceMesh, odd: bool) -> None:
    offload(TASK.model().eval(), mesh)


def cpu_experts_of_others(mesh: DeviceMesh, odd: bool) -> None:
    offload(TASK.model(), mesh, settings=Settings(cpu_experts=True, placement="dynamic"))


def cpu_experts_in_groups(mesh: DeviceMesh, odd: bool) -> None:
    offload(TASK.model(), mesh, settings=Settings(cpu_experts=True, exchange_groups=2))


def cpu_experts_of_one(mesh: DeviceMesh, odd: bool) -> None:
    offload(TASK.model(), mesh, settings=Settings(cpu_experts=odd))


def two_dimensions(mesh: DeviceMesh, odd: bool) -> None:
    offload(TASK.model(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("expert", "data")))


def few_experts(mesh: DeviceMesh, odd: bool) -> None:
    offload(GPTMoE(dataclasses.replace(TASK.config, n_experts=1, top_k=1)), mesh)


def save_model(mesh: DeviceMesh, odd: bool) -> None:
    model = TASK.model()
    offload(model, mesh)
    model.state_dict()


def save_optimizer(mesh: DeviceMesh, odd: bool) -> None:
    model = TASK.model()
    offload(model, mesh)
    optimizer = overspill.AdamW(model)
    assert not optimizer.state_dict()["state"]  # accelerate asks for it before the first step
    step(model, optimizer)
    optimizer.state_dict()


ATTEMPTS: list[Callable[[DeviceMesh, bool], None]] = [
    other_config,
    other_seed,
    other_activations,
    small_budget,
    not_finite,
    other_learning_rate,
    in_evaluation,
    cpu_experts_of_others,
    cpu_experts_in_groups,
    cpu_experts_of_one,
    two_dimensions,
    few_experts,
    save_model,
    save_optimizer,
]


@pytest.fixture(scope="module")
def raised() -> Raised:
    """What each attempt raises on both ranks, by its name: one start of processes serves all."""
    zero, one = run_ranks(2, errors, ATTEMPTS)
    names = [attempt.__name__ for attempt in ATTEMPTS]
    return dict(zip(names, zip(zero, one, strict=True), strict=True))


def save_alone(mesh: DeviceMesh) -> None:
    ranks = Ranks(mesh, torch.device("cpu"))
    ranks.gather(None)
    if ranks.rank == 0:
        ranks.meet("saving", seconds=0.2)


def test_what_one_rank_does_alone_is_refused() -> None:
    first, other = run_ranks(2, save_alone)
    assert isinstance(first, RankError)
    assert "saving must be called on all ranks; rank 0 has waited 0.2 s" in str(first)
    assert other is None


def test_what_a_mesh_does_not_support_is_refused_by_name(raised: Raised) -> None:
    cases = {
        in_evaluation: "evaluation mode",
        cpu_experts_of_others: 'placement="dynamic" is not supported with cpu_experts',
        cpu_experts_in_groups: "exchange_groups=2 is not supported with cpu_experts",
        cpu_experts_of_one: "Settings.cpu_experts",
        two_dimensions: "2 dimensions",
        few_experts: "2 ranks for 1 experts",
        save_model: "state_dict",
        save_optimizer: "optimizer's state_dict",
    }
    for attempt, text in cases.items():
        for error in raised[attempt.__name__]:
            assert isinstance(error, ConfigError), error
            assert text in str(error)
