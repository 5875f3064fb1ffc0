"""Optimizer states of dense parameters in host memory: the same results, and no memory is lost."""

import copy
import errno
import mmap
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from overspill.core.errors import BudgetError
from overspill.core.lifetime import Lifetime
from overspill.models.gpt import GPTMoE
from overspill.moe.dense_memory import DenseMemory
from overspill.plan.budget import PROCESS
from overspill.tiers.layout import ALIGN
from overspill.train import checkpoint
from tests.moe.oracle import (
    Run,
    Task,
    adamw,
    assert_same_bits,
    spilled,
    train,
    train_step,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows

TASK = Task(n_layers=2, steps=2)
CPU = torch.device("cpu")


def run_with(dense_states: str, task: Task, where: str, disk: Path, **options: Any) -> Run:
    model = task.model()
    with spilled(model, where, disk, dense_states=dense_states):
        return train(model, adamw(model, task, **options), task)


@pytest.mark.parametrize(
    ("where", "dtype", "state_dtype", "clip"),
    all_pairs(
        ["gpu", "disk, 5 resident"],
        [torch.float32, torch.bfloat16],
        [torch.float32, torch.bfloat16],
        [None, 0.5],
    ),
)
def test_no_bit_depends_on_where_dense_states_are(
    where: str, dtype: torch.dtype, state_dtype: torch.dtype, clip: float | None, tmp_path: Path
) -> None:
    micro_batches = 1 if clip is None else 2
    task = Task(n_layers=2, steps=2, dtype=dtype, clip=clip, micro_batches=micro_batches)
    runs = [run_with(at, task, where, tmp_path, state_dtype=state_dtype) for at in ("gpu", "host")]
    assert_same_bits(*runs)
    assert runs[0].norms == runs[1].norms


def first_steps(model: GPTMoE, optimizer: Any, count: int = 2) -> None:
    for batches in list(TASK.batches())[:count]:
        train_step(model, optimizer, batches)


@pytest.mark.parametrize(
    ("before", "after"), slow_rows([("host", "gpu"), ("gpu", "host"), ("host", "host")], 0, 2)
)
def test_a_run_continues_wherever_its_dense_states_were(
    before: str, after: str, tmp_path: Path
) -> None:
    """From state dicts, and from a checkpoint."""
    whole = run_with("gpu", TASK, "host with 5 slots", tmp_path)
    model = TASK.model()
    with spilled(model, "host with 5 slots", tmp_path, dense_states=before) as engine:
        optimizer = adamw(model, TASK)
        first_steps(model, optimizer, 1)
        weights, states = weights_of(model), copy.deepcopy(optimizer.state_dict())
        state = checkpoint.TrainState(1, 1, "", {})
        folder = checkpoint.save(tmp_path / "saved", state, model, engine, optimizer, 1)
    for kind in ("state dicts", "a checkpoint"):
        model = TASK.model()
        with spilled(model, "host with 5 slots", tmp_path, dense_states=after) as engine:
            optimizer = adamw(model, TASK)
            if kind == "state dicts":
                model.load_state_dict(weights)
                optimizer.load_state_dict(states)
            else:
                checkpoint.load(folder, model, engine, optimizer)
            rest = train(model, optimizer, TASK, first=1)
        assert_same_bits(Run(whole.losses[:1] + rest.losses, [], rest.weights), whole)


def test_a_new_optimizer_and_loaded_states_use_the_memory_of_the_old_ones(tmp_path: Path) -> None:
    def losses(dense_states: str) -> list[float]:
        model, used = TASK.model(), []
        with spilled(model, "host with 2 slots", tmp_path, dense_states=dense_states) as engine:
            optimizer = adamw(model, TASK)
            run = train(model, optimizer, TASK)
            used.append(engine.bytes_by_tier()["host"])
            del optimizer
            optimizer = adamw(model, TASK)  # its states are zero
            run.losses += train(model, optimizer, TASK).losses
            used.append(engine.bytes_by_tier()["host"])
            optimizer.load_state_dict(optimizer.state_dict())
            run.losses += train(model, optimizer, TASK).losses
            used.append(engine.bytes_by_tier()["host"])
        assert used == used[:1] * 3
        return run.losses

    assert losses("host") == losses("gpu")


def test_dense_states_are_counted_and_described(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path, dense_states="host") as engine:
        optimizer = adamw(model, TASK)
        dense = [p for p in model.parameters() if p.numel() > 0]
        planned = sum(8 * p.numel() for p in dense)
        assert engine.placement.dense_states == planned
        size = f"{planned / 1024:.1f} KiB"
        assert engine.describe().endswith(f"; dense optimizer states in host memory ({size})")
        before = engine.bytes_by_tier()["host"]
        first_steps(model, optimizer, 1)
        used = engine.bytes_by_tier()["host"] - before
        assert planned <= used <= planned + 2 * len(dense) * ALIGN


def test_dense_states_count_against_the_host_budget(tmp_path: Path) -> None:
    """Also before they are allocated."""
    options: dict[str, Any] = {"dense_states": "host"}
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path, **options) as engine:
        adamw(model, TASK)
        used = engine.bytes_by_tier()["host"] + engine.placement.dense_states + PROCESS
        gradients = (10 - engine.placement.ring) * engine.layout.weight_bytes
        spare = (engine.placement.ring - 4) * engine.layout.weight_bytes
    model = TASK.model()
    with (
        spilled(model, "host with 2 slots", tmp_path, host_memory=used + gradients - 1, **options),
        pytest.raises(BudgetError, match="gradients that wait for clipping"),
    ):
        adamw(model, Task(clip=0.5))
    model = TASK.model()
    with (
        pytest.raises(BudgetError, match="the experts and dense optimizer states, which need"),
        spilled(model, "host with 2 slots", tmp_path, host_memory=used - spare - ALIGN, **options),
    ):
        pass


def test_a_step_without_memory_for_dense_states_updates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    task = Task(n_layers=2, steps=2, clip=0.5)
    model = task.model()
    with spilled(model, "host with 2 slots", tmp_path, dense_states="host"):
        optimizer = adamw(model, task)
        before = weights_of(model)
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", no_memory)
            with pytest.raises(BudgetError, match=r"the host has no .* for dense optimizer states"):
                train_step(model, optimizer, next(task.batches()))
        optimizer.zero_grad()
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=before))
        run = train(model, optimizer, task)
    assert_same_bits(run, run_with("gpu", task, "host with 2 slots", tmp_path))


def test_states_outlive_the_engine(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path, dense_states="host"):
        optimizer = adamw(model, TASK)
        first_steps(model, optimizer)
        before = copy.deepcopy(optimizer.state_dict()["state"][0])
    assert torch.equal(optimizer.state[model.embedding.weight]["exp_avg"], before["exp_avg"])


# -- memory -----------------------------------------------------------------------------------


def parameter(*shape: int) -> Tensor:
    return nn.Parameter(torch.empty(shape))


def test_memory_is_used_again_only_when_no_tensor_refers_to_it() -> None:
    states = DenseMemory(CPU, Lifetime())
    one = states.zeros(parameter(30, 50), torch.float32)
    one.fill_(3)
    view = one.view(-1)[5:]
    address = one.data_ptr()
    del one
    other = states.zeros(parameter(30, 50), torch.float32)
    assert other.data_ptr() != address
    assert view.eq(3).all()
    del view
    again = states.zeros(parameter(1500), torch.float32)
    assert again.data_ptr() == address
    assert not again.any()
    assert states.host_bytes == 2 * 2 * ALIGN


def test_free_memory_of_another_size_is_released() -> None:
    states = DenseMemory(CPU, Lifetime())
    states.zeros(parameter(100 * ALIGN), torch.float32)
    assert states.host_bytes == 400 * ALIGN
    kept = states.zeros(parameter(10), torch.int16)
    assert states.host_bytes == ALIGN
    assert kept.shape == (10,)


def test_after_close_memory_is_released_with_its_last_tensor() -> None:
    lifetime = Lifetime()
    states = DenseMemory(CPU, lifetime)
    used, unused = (states.zeros(parameter(ALIGN), torch.float32) for _ in range(2))
    del unused
    assert states.host_bytes == 8 * ALIGN
    lifetime.closed = True
    states.close()
    assert states.host_bytes == 4 * ALIGN
    assert not used.any()
    del used
    assert states.host_bytes == 0


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_a_state_has_the_shape_of_its_parameter(shape: tuple[int, ...]) -> None:
    states = DenseMemory(CPU, Lifetime())
    state = states.zeros(parameter(*shape), torch.bfloat16)
    assert (state.shape, state.dtype) == (shape, torch.bfloat16)
    assert not state.any()
    assert states.host_bytes == (ALIGN if state.numel() else 0)


def test_states_on_the_device_are_counted_while_they_live() -> None:
    states = DenseMemory(CPU, Lifetime())
    first = states.zeros(torch.zeros(8, 4), torch.float32, on_host=False)
    second = states.zeros(torch.zeros(3), torch.bfloat16, on_host=False)
    assert states.device_bytes == 8 * 4 * 4 + 3 * 2
    view = first[0]
    del first
    assert states.device_bytes == 8 * 4 * 4 + 3 * 2
    del view
    assert states.device_bytes == second.nbytes
