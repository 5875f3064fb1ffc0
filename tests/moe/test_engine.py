"""The engine from outside: gradients, memory, and what it holds when it is closed."""

import copy
import dataclasses
import gc
import io
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.core.errors import ConfigError, OrderError
from overspill.moe.settings import Settings
from tests.moe.oracle import (
    ONE_OF_EACH,
    Run,
    Task,
    adamw,
    loss_of,
    plain_run,
    spilled,
    train,
    train_step,
)

TASK = Task(n_layers=2, clip=0.5, micro_batches=2)


def norm(model: nn.Module) -> float:
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))


@pytest.mark.parametrize("where", ONE_OF_EACH)
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
        assert optimizer.total_norm == pytest.approx(expected, rel=1e-5), "not counted twice"
        optimizer.zero_grad()
        assert all(
            p.grad is None for p in model.parameters() if hasattr(p, "is_expert_placeholder")
        )


def test_memory_is_within_its_budgets(tmp_path: Path) -> None:
    given = {"device": "cpu", "quiet": True, "gpu_memory": "256MiB", "host_memory": "3GiB"}
    for disk in (None, tmp_path):
        model = TASK.model()
        spill = {} if disk is None else {"disk": disk, "mode": "disk", "slots": 4, "host_slots": 3}
        overspill.offload(model, **given, **spill)
        engine = model.overspill
        used, budgets = engine.bytes_by_tier(), engine.memory.budget_by_tier()
        assert (budgets["gpu"], budgets["host"]) == (256 << 20, 3 << 30)
        assert used["gpu"] <= 256 << 20
        if disk is None:
            assert (used["disk"], budgets["disk"]) == (0, None)
        else:
            assert budgets["disk"] > used["disk"] > 0
        assert engine.memory.reserved_bytes() is None, "there is no GPU"
        engine.close()


def test_gradients_of_experts_cannot_be_set(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "gpu", tmp_path):
        placeholder = next(p for p in model.parameters() if hasattr(p, "is_expert_placeholder"))
        placeholder.grad = None  # as zero_grad does
        with pytest.raises(OrderError, match="cannot be set"):
            placeholder.grad = torch.zeros(0)


def test_the_norms_that_stand_for_gradients_can_be_copied_and_saved(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "gpu", tmp_path):
        optimizer = adamw(model, TASK)
        loss_of(model, next(TASK.batches())[0]).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        file = io.BytesIO()
        torch.save(gradients, file)
        file.seek(0)
        for kept in (copy.deepcopy(gradients), torch.load(file)):
            assert all(torch.equal(kept[name], value) for name, value in gradients.items())
        optimizer.step()


@pytest.mark.parametrize("where", ["gpu", "host with 2 slots"])
def test_a_saved_folder_holds_the_weights_until_the_next_step(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, TASK)
        engine.records.mark_saved(tmp_path)
        loss_of(model, next(TASK.batches())[0]).backward()
        assert engine.records.saved_to == tmp_path
        optimizer.step()
        assert engine.records.saved_to is None


def tensors_over(size: int) -> set[int]:
    """Addresses of all tensors whose memory is larger than `size` bytes."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) is Tensor]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr() for storage in storages if storage.nbytes() > size}


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_a_closed_engine_has_released_its_memory(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path, idle=False) as engine:
        record = engine.layout.weight_bytes
        optimizer = adamw(model, TASK)
        loss_of(model, next(TASK.batches())[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.flush()
        opened = tensors_over(record)
        engine.close()
        closed = tensors_over(record)
    residents = 4 * TASK.n_layers  # weights, three states; in each layer
    memories = {"gpu": residents, "host with 2 slots": 5, "disk, 5 resident": 5 + residents}
    assert len(opened - closed) == memories[where], "weights, states, gradients, slots, buffers"
    assert engine.bytes_by_tier()["gpu"] == 0


def test_the_memory_of_each_tier_does_not_grow(tmp_path: Path) -> None:
    task = Task(steps=4)
    model = task.model()
    with spilled(model, "disk behind 9 host slots", tmp_path) as engine:
        optimizer = adamw(model, task)
        allocated = engine.bytes_by_tier()
        train(model, optimizer, task)
        assert engine.bytes_by_tier() == allocated
        # 8 slots, whatever was uploaded: no expert is on the device beside them
        assert allocated["gpu"] == 8 * engine.layout.weight_bytes


def test_two_jobs_share_a_disk_folder(tmp_path: Path) -> None:
    task = Task(steps=3)
    models = [task.model(), task.model()]
    options = {"device": "cpu", "mode": "disk", "slots": 3, "host_slots": 3, "quiet": True}
    for model in models:
        overspill.offload(model, disk=tmp_path, **options)
    try:
        runs = [Run(), Run()]
        optimizers = [adamw(model, task) for model in models]
        for batches in task.batches():
            for model, optimizer, run in zip(models, optimizers, runs, strict=True):
                run.losses.append(train_step(model, optimizer, batches))
        assert runs[0].losses == runs[1].losses == pytest.approx(plain_run(task).losses, rel=1e-5)
    finally:
        for model in models:
            model.overspill.close()
    assert not list(tmp_path.iterdir())


def test_an_uploader_that_is_refused_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    options = {"mode": "disk", "slots": 3, "host_slots": 3, "disk": tmp_path, "device": "cpu"}
    with pytest.raises(ConfigError, match="uploader='native' is not possible"):
        overspill.offload(TASK.model(), settings=Settings(uploader="native"), **options)
    assert len(os.listdir("/proc/self/fd")) == before


def test_after_a_refused_switch_the_engine_goes_on(tmp_path: Path) -> None:
    task = Task(steps=3)
    model, run = task.model(), Run()
    with spilled(model, "disk behind 3 host slots", tmp_path) as engine:
        optimizer = adamw(model, task)
        for batches in task.batches():
            settings = dataclasses.replace(engine.settings, uploader="native")
            with pytest.raises(ConfigError, match="uploader='native' is not possible"):
                engine.switch(settings)
            assert engine.settings.uploader == "auto"
            run.losses.append(train_step(model, optimizer, batches))
    assert run.losses == pytest.approx(plain_run(task).losses, rel=1e-5)


@pytest.mark.parametrize("where", ["gpu", "host with 2 slots"])
def test_settings_that_cannot_be_switched_are_refused(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path) as engine:
        with pytest.raises(ConfigError, match="max_rows cannot be switched"):
            engine.switch(dataclasses.replace(engine.settings, max_rows=3))
        engine.switch(dataclasses.replace(engine.settings, waves=False))
        assert not engine.settings.waves
