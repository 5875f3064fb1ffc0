"""Frozen experts have no optimizer states until they are trained or their states are loaded."""

from pathlib import Path

import pytest
import torch

import overspill
from overspill import offload
from overspill.core.errors import BudgetError, OrderError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from overspill.plan.budget import PROCESS
from overspill.simulate import ReplayedRouting, routed_by
from overspill.train.checkpoint_tensors import read_optimizer, write_optimizer
from tests.moe.fake_memory import FakeMemory
from tests.moe.oracle import (
    HOME_OR_NOT,
    SOME_AT_HOME,
    Run,
    Task,
    adamw,
    assert_follows,
    loss_of,
    observe_passes,
    spilled,
    train,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows


def set_frozen(model: GPTMoE, frozen: bool) -> None:
    """All experts, offloaded or not."""
    for moe in model.moe_layers():
        for name, parameter in moe.named_parameters():
            if not name.startswith("router"):
                parameter.requires_grad_(not frozen)


def unfreezing_run(
    model: GPTMoE, optimizer: torch.optim.Optimizer, task: Task, trained_from: int
) -> Run:
    """Training whose experts are frozen before step `trained_from`."""
    run = Run()
    for step, (tokens,) in enumerate(task.batches()):
        set_frozen(model, step < trained_from)
        loss = loss_of(model, tokens)
        loss.backward()
        if task.clip is not None and not isinstance(optimizer, overspill.AdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights = weights_of(model)
    return run


def plain_unfreezing_run(task: Task, trained_from: int) -> Run:
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    return unfreezing_run(model, optimizer, task, trained_from)


@pytest.mark.parametrize(
    ("where", "clip", "checkpoint", "overlap"),
    slow_rows(all_pairs(HOME_OR_NOT, [None, 0.5], [False, True], [True, False]), 1, 2),
)
def test_states_are_allocated_when_experts_are_unfrozen(
    where: str, clip: float | None, checkpoint: bool, overlap: bool, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=3, clip=clip, checkpoint=checkpoint)
    model = task.model()
    with spilled(model, where, tmp_path, Settings(overlap_updates=overlap)) as engine:
        set_frozen(model, True)
        before = engine.bytes_by_tier()
        optimizer = adamw(model, task)
        loss_of(model, next(task.batches())[0]).backward()
        optimizer.zero_grad()
        assert engine.bytes_by_tier() == before
        run = unfreezing_run(model, optimizer, task, trained_from=1)
        more = sum(engine.bytes_by_tier().values()) - sum(before.values())
        assert more >= 8 * engine.expert_parameters
    assert_follows(run, plain_unfreezing_run(task, trained_from=1))


@pytest.mark.parametrize("where", slow_rows(["host with 2 slots", "disk behind 3 host slots"], 1))
def test_experts_that_fill_the_device_make_room_for_states_when_they_are_unfrozen(
    where: str, tmp_path: Path
) -> None:
    task = Task(n_layers=3, steps=4)
    model = task.model()
    with spilled(model, where, tmp_path, host_memory="2GiB") as engine:
        set_frozen(model, True)
        memory = FakeMemory(engine, other=1 << 16)
        budget = int((memory.peak() + 12.5 * engine.layout.weight_bytes) / 0.98)
        engine.memory.fill(memory, budget)
        observe_passes(model, next(task.batches())[0])
        residents = []

        def note(*_: object) -> None:
            residents.append(sum(engine.residents))
            assert memory.peak() <= budget

        model.register_forward_hook(note)
        run = unfreezing_run(model, adamw(model, task), task, trained_from=2)
        assert memory.peak() <= budget
        assert residents[1] == 12
        assert 0 < sum(engine.residents) <= 4
    assert_follows(run, plain_unfreezing_run(task, trained_from=2))


def test_residents_follow_usage_while_an_optimizer_has_frozen_experts(tmp_path: Path) -> None:
    task = Task(n_layers=1, steps=6)
    model, settings = task.model(), Settings(follow_usage=True)
    with spilled(model, "host, 7 resident", tmp_path, settings, gpu_experts=2) as engine:
        set_frozen(model, True)
        optimizer = adamw(model, task)
        with routed_by(model, ReplayedRouting(torch.tensor([[[3, 4]]]), engine.n_experts)):
            train(model, optimizer, task)
            assert engine.addresses.resident == [(3, 4)]
            set_frozen(model, False)
            train(model, optimizer, task, first=4)
        assert engine.addresses.resident == [(3, 4)]


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_states_of_frozen_experts_are_loaded_if_there_are_some(where: str, tmp_path: Path) -> None:
    """As in torch: those of a state dict, and those of a checkpoint."""
    task = Task(n_layers=2, steps=2)
    model, file = task.model(), tmp_path / "optimizer"
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, task)
        train(model, optimizer, task)
        trained = optimizer.state_dict()
        write_optimizer(file, engine, optimizer)
    for load in ("state dict", "checkpoint"):
        model = task.model()
        with spilled(model, where, tmp_path) as engine:
            set_frozen(model, True)
            optimizer = adamw(model, task)
            if load == "checkpoint":
                read_optimizer(file, engine, optimizer)
            else:
                optimizer.load_state_dict(trained)
            loaded = optimizer.state_dict()["state"]
        assert loaded.keys() == trained["state"].keys()
        for number, entry in trained["state"].items():
            assert all(torch.equal(entry[n], loaded[number][n]) for n in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_frozen_experts_are_saved_and_loaded_without_states(where: str, tmp_path: Path) -> None:
    task = Task(n_layers=2, steps=2)
    file = tmp_path / "optimizer"
    model = task.model()
    with spilled(model, where, tmp_path) as engine:
        set_frozen(model, True)
        optimizer = adamw(model, task)
        train(model, optimizer, task)
        experts = [n for n, p in enumerate(model.parameters()) if hasattr(p, "engine")]
        saved = optimizer.state_dict()
        assert saved["state"]
        assert not saved["state"].keys() & set(experts)
        write_optimizer(file, engine, optimizer)
        before = engine.bytes_by_tier()
        read_optimizer(file, engine, optimizer)
        optimizer.load_state_dict(saved)
        optimizer = None  # type: ignore[assignment]
        optimizer = adamw(model, task)  # which starts from zero
        train(model, optimizer, task)
        assert engine.bytes_by_tier() == before


NOT_PLANNED = "experts were frozen when the model was offloaded, so no memory is planned"


def plain_frozen_run(task: Task) -> Run:
    return plain_unfreezing_run(task, trained_from=task.steps)


@pytest.mark.parametrize("where", ["gpu", "host with 2 slots", "disk, 5 resident"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_experts_that_are_frozen_before_train_the_rest_without_memory_for_states(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=3, clip=clip)
    model = task.model()
    set_frozen(model, True)
    with spilled(model, where, tmp_path) as engine:
        assert engine.placement.training
        assert not engine.placement.trains_experts
        before = engine.bytes_by_tier()
        run = train(model, adamw(model, task), task)
        assert engine.bytes_by_tier()["disk"] == before["disk"]
        assert engine.bytes_by_tier()["host"] == before["host"]
    plain = plain_frozen_run(task)
    run.norms = []
    assert_follows(run, plain)


def test_a_budget_that_holds_the_weights_suffices_for_frozen_experts(tmp_path: Path) -> None:
    experts = GPTConfig(
        vocab=48, n_layers=2, d_model=64, d_hidden=1024, n_heads=2, n_experts=8, top_k=2, max_seq=16
    )
    weights = 2 * 8 * 2 * 64 * 1024 * 4
    given = {"host_memory": PROCESS + weights + (1 << 20), "slots": 2}

    model = GPTMoE(experts)
    with pytest.raises(BudgetError, match="host-memory"):
        offload(model, device="cpu", mode="host", quiet=True, **given)
    set_frozen(model, True)
    with spilled(model, "host with 2 slots", tmp_path, **given) as engine:
        assert engine.bytes_by_tier()["host"] >= weights
        tokens = torch.arange(16).view(1, 16)
        optimizer = overspill.AdamW(model)
        loss_of(model, tokens).backward()
        optimizer.step()


def test_experts_of_a_layer_that_is_not_frozen_are_trained_with_those_of_others_frozen(
    tmp_path: Path,
) -> None:
    task = Task(n_layers=2, steps=2)
    runs = []
    for offloaded in (False, True):
        model = task.model()
        for parameter in model.moe_layers()[0].expert_parameters():
            parameter.requires_grad_(False)
        if offloaded:
            with spilled(model, "host with 2 slots", tmp_path) as engine:
                assert engine.placement.trains_experts
                runs.append(train(model, adamw(model, task), task))
        else:
            plain = torch.optim.AdamW(model.parameters(), task.lr, weight_decay=task.weight_decay)
            runs.append(unfrozen_run(model, plain, task))
    assert_follows(runs[1], runs[0])


def unfrozen_run(model: GPTMoE, optimizer: torch.optim.Optimizer, task: Task) -> Run:
    run = Run()
    for (tokens,) in task.batches():
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.weights = weights_of(model)
    return run


@pytest.mark.parametrize("clip", [None, 0.5])
def test_unfreezing_experts_that_were_offloaded_frozen_is_refused_before_they_compute(
    clip: float | None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=2, clip=clip)
    batches = [tokens for (tokens,) in task.batches()]
    trained = task.model()
    with spilled(trained, "host with 2 slots", tmp_path):
        optimizer = adamw(trained, task)
        train(trained, optimizer, task)
        states = optimizer.state_dict()
    model = task.model()
    set_frozen(model, True)
    with spilled(model, "host with 2 slots", tmp_path):
        set_frozen(model, False)
        with pytest.raises(OrderError, match=NOT_PLANNED):
            adamw(model, task)
        with pytest.raises(OrderError, match=NOT_PLANNED):  # also without an optimizer for them
            loss_of(model, batches[0])
        with torch.no_grad():
            loss_of(model, batches[0])
        set_frozen(model, True)
        optimizer = adamw(model, task)
        loss_of(model, batches[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        set_frozen(model, False)
        with pytest.raises(OrderError, match=NOT_PLANNED):
            loss_of(model, batches[1])
        set_frozen(model, True)
        with pytest.raises(OrderError, match=NOT_PLANNED):
            optimizer.load_state_dict(states)
        number, entry = next(iter(saved["state"].items()))
        assert torch.equal(optimizer.state_dict()["state"][number]["exp_avg"], entry["exp_avg"])
        loss_of(model, batches[1]).backward()
        optimizer.step()
