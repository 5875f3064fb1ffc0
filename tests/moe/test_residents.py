"""Residents: experts move to the device and back between steps, and no bit changes."""

import contextlib
import copy
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.core.errors import BudgetError, ConfigError, NonFiniteError, OrderError
from overspill.moe.settings import Settings
from tests.interrupts import calls_of, interrupted, spread
from tests.moe.fake_memory import FakeMemory
from tests.moe.oracle import (
    N_EXPERTS,
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    delays,
    loss_of,
    observe_passes,
    plain_run,
    spilled,
    spilled_run,
    streamed_run,
    train,
    train_step,
    weights_of,
)
from tests.slow import slow_rows

TASKS = [
    Task(n_layers=3),
    Task(n_layers=2, clip=0.5, micro_batches=2, starve=True),
    Task(n_layers=2, checkpoint=True, dtype=torch.bfloat16),
    Task(n_layers=2, micro_batches=2, top_k=1),
]
START = ["gpu", "host with 5 slots", "disk behind 3 host slots", "disk, 5 resident"]


def random_residents(n_layers: int, seed: int) -> Iterator[list[int]]:
    """Nowhere near each other: all, none, and any other number in each layer."""
    rng = random.Random(seed)
    while True:
        yield [N_EXPERTS] * n_layers
        yield [rng.randint(0, N_EXPERTS) for _ in range(n_layers)]
        yield [0] * n_layers
        yield [rng.randint(0, N_EXPERTS) for _ in range(n_layers)]


def moving_run(
    task: Task, where: str, disk: Path, settings: Settings | None = None, **options: Any
) -> Run:
    """Like `spilled_run`, with other residents before every step."""
    model, run = task.model(), Run()
    residents = random_residents(task.n_layers, seed=task.steps)
    with spilled(model, where, disk, settings, host_memory="2GiB") as engine:
        optimizer = adamw(model, task, **options)
        for batches in task.batches():
            counts = next(residents)
            engine.set_residents(counts)
            assert engine.residents == counts
            run.losses.append(train_step(model, optimizer, batches))
            if optimizer.total_norm is not None:
                run.norms.append(optimizer.total_norm)
        run.weights = weights_of(model)
        engine.check_conserved()
    return run


# where experts were before the first change does not matter to every task
@pytest.mark.parametrize(
    ("task", "where"), slow_rows(zip(TASKS, START, strict=True), 0, 3), ids=str
)
def test_residents_that_change_before_every_step_change_no_bit(
    task: Task, where: str, tmp_path: Path
) -> None:
    run = moving_run(task, where, tmp_path)
    assert_same_bits(run, streamed_run(task))
    if task.dtype == torch.float32:
        assert_follows(run, plain_run(task))


def test_the_native_uploader_follows_experts_to_other_host_slots(tmp_path: Path) -> None:
    task = Task(steps=7)  # the sixth gives some of them other slots
    run = moving_run(task, "host, 7 resident", tmp_path, Settings(uploader="native"))
    assert_same_bits(run, streamed_run(task))


def test_bf16_moments_are_rounded_alike_in_every_place(tmp_path: Path) -> None:
    task = TASKS[2]
    options = {"state_dtype": torch.bfloat16}
    run = moving_run(task, "disk behind 3 host slots", tmp_path, **options)
    for where in ("gpu", "host, 7 resident"):
        model = task.model()
        with spilled(model, where, tmp_path):
            assert_same_bits(run, train(model, adamw(model, task, **options), task))


@pytest.mark.parametrize(
    ("task", "where"),
    [*zip(TASKS, 2 * ["host, 7 resident", "disk, 5 resident"], strict=True)],
    ids=str,
)
def test_experts_in_every_tier_train_as_in_one(task: Task, where: str, tmp_path: Path) -> None:
    run = spilled_run(task, where, tmp_path)
    assert_same_bits(run, streamed_run(task))


@pytest.mark.parametrize("where", slow_rows(["host with 5 slots", "disk behind 3 host slots"], 0))
def test_delayed_transfers_do_not_disturb_a_change_of_residents(where: str, tmp_path: Path) -> None:
    task = Task(steps=4)
    settings = Settings(inject=delays(seed=3, longest=2e-3))
    assert_same_bits(moving_run(task, where, tmp_path, settings), streamed_run(task))


def states_of(optimizer: overspill.AdamW) -> dict[int, dict[str, torch.Tensor]]:
    return optimizer.state_dict()["state"]


@pytest.mark.parametrize("dtype", slow_rows([torch.float32, torch.bfloat16], 0))
def test_moving_keeps_weights_and_states_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    task = Task(n_layers=3, steps=2, dtype=dtype)
    model = task.model()
    with spilled(model, "disk behind 9 host slots", tmp_path, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        for batches in task.batches():
            train_step(model, optimizer, batches)
        weights, states = weights_of(model), states_of(optimizer)
        for counts in ([5, 5, 5], [1, 4, 0], [0, 0, 0], [2, 3, 4]):
            engine.set_residents(counts)
            assert_same_bits(Run(weights=weights_of(model)), Run(weights=weights))
            for number, found in states_of(optimizer).items():
                for name, value in found.items():
                    torch.testing.assert_close(value, states[number][name], rtol=0, atol=0)


def test_memory_follows_the_residents(tmp_path: Path) -> None:
    task = Task(n_layers=3)
    model = task.model()
    with spilled(model, "host with 2 slots", tmp_path, host_memory="2GiB") as engine:
        adamw(model, task)
        record = engine.layout.shape.numel * 12  # fp32: weight and two moments
        slots = engine.bytes_by_tier()["gpu"]
        for counts in ([0, 1, 5], [5, 5, 5], [0, 0, 0]):
            engine.set_residents(counts)
            assert engine.bytes_by_tier()["gpu"] == slots + sum(counts) * record
            assert f"{sum(counts)} experts and" in engine.describe() or sum(counts) in (0, 15)


def test_a_model_that_was_loaded_for_inference_moves_its_weights(tmp_path: Path) -> None:
    task = Task(n_layers=3)
    (tokens,) = next(task.batches())
    model = task.model().eval()
    expected = loss_of(model, tokens).item()
    with spilled(model, "host with 2 slots", tmp_path) as engine, torch.no_grad():
        for counts in ([5, 0, 2], [5, 5, 5], [0, 3, 0]):
            engine.set_residents(counts)
            assert loss_of(model, tokens).item() == pytest.approx(expected, rel=1e-6)


def test_residents_cannot_change_while_gradients_wait(tmp_path: Path) -> None:
    task = Task(n_layers=3, clip=0.5)
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, "host with 2 slots", tmp_path) as engine:
        optimizer = adamw(model, task)
        loss_of(model, tokens).backward()
        with pytest.raises(OrderError, match=r"between backward and step\(\); call opt\.step"):
            engine.set_residents([1, 1, 1])
        optimizer.step()
        engine.set_residents([1, 1, 1])


@pytest.mark.parametrize("counts", [[1, 1], [6, 0, 0], [-1, 0, 0]])
def test_impossible_residents_are_refused(counts: list[int], tmp_path: Path) -> None:
    model = Task(n_layers=3).model()
    with (
        spilled(model, "host with 2 slots", tmp_path) as engine,
        pytest.raises(ConfigError, match="must be 3 numbers from 0 to 5"),
    ):
        engine.set_residents(counts)


def test_experts_stay_where_they_are_if_nothing_else_has_room(tmp_path: Path) -> None:
    task = Task(n_layers=3, steps=2)
    model, run = task.model(), Run()
    with spilled(model, "gpu", tmp_path, host_memory=1 << 20) as engine:
        optimizer = adamw(model, task)
        with pytest.raises(BudgetError, match=r"need --host-memory .*, it is 1.0 MiB"):
            engine.set_residents([0, 0, 0])
        assert engine.residents == [5, 5, 5]
        run.losses = [train_step(model, optimizer, batches) for batches in task.batches()]
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


def test_a_checkpoint_is_the_same_whatever_the_residents_were(tmp_path: Path) -> None:
    task = Task(steps=2, clip=1.0)
    saved = []
    for where in ("gpu", "host with 2 slots", "disk, 5 resident"):
        model = task.model()
        with spilled(model, where, tmp_path):
            optimizer = adamw(model, task)
            for batches in task.batches():
                train_step(model, optimizer, batches)
            saved.append((weights_of(model), states_of(optimizer)))
    for weights, states in saved[1:]:
        assert_same_bits(Run(weights=weights), Run(weights=saved[0][0]))
        for number, found in states.items():
            for name, value in found.items():
                torch.testing.assert_close(value, saved[0][1][number][name], rtol=0, atol=0)


def test_settings_can_be_switched_with_experts_in_every_tier(tmp_path: Path) -> None:
    task = Task(steps=4)
    model, run = task.model(), Run()
    with spilled(model, "disk, 5 resident", tmp_path) as engine:
        optimizer = adamw(model, task)
        for number, batches in enumerate(task.batches()):
            engine.switch(dataclasses.replace(engine.settings, waves=number % 2 == 0))
            run.losses.append(train_step(model, optimizer, batches))
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize(
    ("where", "most"), slow_rows([("host with 2 slots", 11), ("disk behind 3 host slots", 9)], 1)
)
def test_memory_is_filled_after_the_first_steps(where: str, most: int, tmp_path: Path) -> None:
    """In host mode more experts have room, because their gradients may wait in host memory."""
    task = Task(n_layers=3, steps=14, clip=0.5)
    model, run, residents = task.model(), Run(), []
    with spilled(model, where, tmp_path, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        record = engine.layout.shape.numel * 16  # fp32: weight, two moments, kept gradient
        memory = FakeMemory(engine, other=1 << 16)
        budget = int((memory.peak() + 9.5 * record) / 0.98)
        engine.memory.fill(memory, budget)
        for batches in task.batches():
            run.losses.append(train_step(model, optimizer, batches))
            run.norms.append(optimizer.total_norm or 0.0)
            residents.append(sum(engine.residents))
        assert residents[:2] == [0, 0]
        assert most - 2 < residents[-1] <= most
        assert memory.peak() <= budget
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


def test_experts_give_way_to_another_model_but_not_within_a_step(tmp_path: Path) -> None:
    task = Task(clip=0.5)
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, "host with 2 slots", tmp_path, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        memory = FakeMemory(engine, other=1 << 16)
        record = engine.layout.shape.numel * 16
        engine.memory.fill(memory, int((memory.peak() + 9.5 * record) / 0.98))
        train_step(model, optimizer, [tokens])
        observe_passes(model, tokens)
        loss_of(model, tokens).backward()
        before = sum(engine.residents)
        left = memory.peak() - 3 * record
        memory.available = lambda: left  # type: ignore[method-assign]
        engine.memory.shrink()
        assert sum(engine.residents) == before
        optimizer.step()
        optimizer.zero_grad()
        engine.memory.shrink()
        assert 0 < sum(engine.residents) < before
    engine.memory.shrink()  # closed


def test_experts_leave_the_device_until_passes_with_clipping_were_observed(tmp_path: Path) -> None:
    task, clipped = Task(n_layers=3), Task(n_layers=3, clip=0.5)
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, "host with 2 slots", tmp_path, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        memory = FakeMemory(engine, other=1 << 16)
        record = engine.layout.shape.numel * 16
        engine.memory.fill(memory, int((memory.peak() + 9.5 * record) / 0.98))
        for each, leave in ((task, False), (task, False), (clipped, True)):
            before, optimizer = sum(engine.residents), None
            optimizer = adamw(model, each)
            assert sum(engine.residents) == (0 if leave else before)
            train_step(model, optimizer, [tokens])
            observe_passes(model, tokens)
            train_step(model, optimizer, [tokens])
            assert sum(engine.residents) >= 6


def test_experts_leave_before_an_optimizer_that_needs_more_memory_for_them(tmp_path: Path) -> None:
    """Without states, with states, with kept gradients too, and when micro-batches begin."""
    task, clipped = Task(n_layers=3), Task(n_layers=3, clip=0.5)
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, "host with 2 slots", tmp_path, host_memory="2GiB") as engine:
        weights = engine.layout.weight_bytes
        memory = FakeMemory(engine, other=1 << 16)
        budget = int((memory.peak() + 14.5 * weights) / 0.98)
        engine.memory.fill(memory, budget)
        for layer in model.moe_layers():
            layer.requires_grad_(False)
        observe_passes(model, tokens)
        with torch.no_grad():
            loss_of(model, tokens)
        assert sum(engine.residents) == 14
        for layer in model.moe_layers():
            layer.requires_grad_(True)
        for each, micro in ((task, 1), (task, 2), (clipped, 1)):
            optimizer = None
            optimizer = adamw(model, each)
            assert memory.peak() <= budget
            for _ in range(2):
                train_step(model, optimizer, [tokens] * micro)
                assert memory.peak() <= budget
                observe_passes(model, tokens)
            assert sum(engine.memory.share) >= 3


@pytest.mark.parametrize("where", slow_rows(["gpu", "disk behind 3 host slots"], 1))
def test_an_interrupt_anywhere_in_a_move_loses_nothing(where: str, tmp_path: Path) -> None:
    task = Task(n_layers=2, steps=1)
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, where, tmp_path, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        train_step(model, optimizer, [tokens])
        weights, states = weights_of(model), copy.deepcopy(states_of(optimizer))
        with torch.no_grad():
            expected = loss_of(model, tokens).item()
        for counts in ([4, 1], [0, 3], [5, 5], [0, 0]):
            before = engine.residents

            def move(counts: list[int] = counts, before: list[int] = before) -> None:
                engine.set_residents(before)
                engine.set_residents(counts)

            for at in spread(calls_of(move), 8):
                interrupted(move, at)
                with torch.no_grad():
                    assert loss_of(model, tokens).item() == pytest.approx(expected, rel=1e-6)
            move()
            engine.check_conserved()
            assert engine.residents == counts
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=weights))
        for number, found in states_of(optimizer).items():
            for name, value in found.items():
                torch.testing.assert_close(value, states[number][name], rtol=0, atol=0)


def test_cpu_experts_follow_experts_to_other_host_slots(tmp_path: Path) -> None:
    task = Task(n_layers=3)
    model, (tokens,) = task.model().eval(), next(task.batches())
    expected = loss_of(model, tokens).item()
    settings = Settings(cpu_experts=True, cpu_policy=lambda counts, phase: frozenset({2, 4}))
    with spilled(model, "host with 5 slots", tmp_path, settings) as engine, torch.no_grad():
        for counts in ([0, 0, 0], [3, 3, 3], [0, 0, 0], [5, 0, 2], [0, 0, 0]):
            engine.set_residents(counts)
            assert loss_of(model, tokens).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("where", slow_rows(["gpu", "host with 5 slots"], 0))
def test_experts_that_moved_in_inference_mode_can_be_trained(where: str, tmp_path: Path) -> None:
    task = Task(n_layers=3, steps=3, clip=0.5)
    model, run = task.model(), Run()
    with spilled(model, where, tmp_path, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        for batches in task.batches():
            with torch.inference_mode():
                engine.set_residents([2, 2, 2] if engine.residents[0] != 2 else [4, 0, 5])
                loss_of(model, batches[0])
            run.losses.append(train_step(model, optimizer, batches))
            run.norms.append(optimizer.total_norm or 0.0)
        run.weights = weights_of(model)
        model.load_state_dict(run.weights)
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize("counts", [[2, 2, 0], [0, 1, 5]])
def test_a_nan_loss_changes_no_expert_wherever_it_lives(counts: list[int], tmp_path: Path) -> None:
    task = Task(n_layers=3)
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, "host with 5 slots", tmp_path) as engine:
        optimizer = adamw(model, task)
        train_step(model, optimizer, [tokens])
        engine.set_residents(counts)
        before = weights_of(model)

        def step() -> None:
            (loss_of(model, tokens) * float("nan")).backward()
            optimizer.step()

        with pytest.raises(NonFiniteError):
            step()
        for name, weight in weights_of(model).items():
            if ".moe.w_" in name:
                torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(("counts", "micro_batches"), [([5, 5, 5], 2), ([2, 0, 5], 1)])
def test_step_reports_a_nan_once_and_training_goes_on(
    counts: list[int], micro_batches: int, tmp_path: Path
) -> None:
    task = Task(n_layers=3, steps=3, micro_batches=micro_batches)
    first, bad, *others = task.batches()
    model, losses = task.model(), []
    with spilled(model, "host with 5 slots", tmp_path) as engine:
        optimizer = adamw(model, task)
        engine.set_residents(counts)
        losses.append(train_step(model, optimizer, first))
        before = weights_of(model)
        for number, tokens in enumerate(bad, start=1):
            with optimizer.accumulate() if number < micro_batches else contextlib.nullcontext():
                (loss_of(model, tokens) * float("nan")).backward()  # does not wait for the device
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            optimizer.step()
        optimizer.zero_grad()
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=before))
        losses += [train_step(model, optimizer, batches) for batches in others]
        assert optimizer.steps_taken == 2
    plain, want = task.model(), []
    with spilled(plain, "host with 2 slots", tmp_path):
        optimizer = adamw(plain, task)
        want = [train_step(plain, optimizer, batches) for batches in (first, *others)]
    assert losses == want


def test_updates_after_a_gradient_that_is_not_finite_are_refused(tmp_path: Path) -> None:
    task = Task()
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, "gpu", tmp_path):
        optimizer = adamw(model, task)
        before = weights_of(model)
        model.blocks[1].register_full_backward_pre_hook(
            lambda _, grads: tuple(None if g is None else g * float("nan") for g in grads)
        )
        loss_of(model, tokens).backward()
        with pytest.raises(NonFiniteError, match="go on from the last checkpoint"):
            optimizer.step()
        for name, weight in weights_of(model).items():
            if ".moe.w_" in name:
                # the gradient of the upper layer was finite, and it is updated first
                assert torch.equal(weight, before[name]) is not name.startswith("blocks.2."), name


@pytest.mark.parametrize("where", ["gpu", "host, 7 resident"])
def test_norms_of_kept_gradients_follow_every_micro_batch(where: str, tmp_path: Path) -> None:
    """They are computed once, unless gradients were added after."""
    task = Task(clip=1e9)
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, task)
        squares = []
        for _ in range(2):
            with optimizer.accumulate():
                loss_of(model, tokens).backward()
            squares += [engine.training.gradient_squares(), engine.training.gradient_squares()]
        assert squares[0] == squares[1]
        assert squares[2] == squares[3] == pytest.approx(4 * squares[0], rel=1e-5)
        optimizer.zero_grad()
        assert engine.training.gradient_squares() == 0


def test_experts_return_to_the_disk_within_the_host_memory_they_came_from(tmp_path: Path) -> None:
    task = Task(n_layers=3)
    model, (tokens,) = task.model(), next(task.batches())
    with spilled(model, "disk behind 9 host slots", tmp_path) as engine:
        optimizer = adamw(model, task)
        train_step(model, optimizer, [tokens])
        host = engine.bytes_by_tier()["host"]
        for _ in range(3):
            engine.set_residents([3, 3, 3])
            train_step(model, optimizer, [tokens])  # fills the cache
            engine.set_residents([0, 0, 0])
            assert engine.bytes_by_tier()["host"] == host


def test_a_device_without_memory_for_a_move_keeps_its_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(n_layers=3, clip=0.5, steps=6)
    model, run = task.model(), Run()
    zeros = torch.zeros
    with spilled(model, "host with 5 slots", tmp_path) as engine:
        optimizer = adamw(model, task)
        for number, batches in enumerate(task.batches()):
            left = number

            def scarce(*args: Any, **options: Any) -> torch.Tensor:
                nonlocal left
                left -= 1
                if left == 0:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return zeros(*args, **options)

            with monkeypatch.context() as patch, contextlib.suppress(torch.OutOfMemoryError):
                patch.setattr(torch, "zeros", scarce)
                engine.set_residents([number % 3, 3, 5 - number % 4])
            run.losses.append(train_step(model, optimizer, batches))
            run.norms.append(optimizer.total_norm or 0.0)
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


def test_residents_that_were_refused_leave_the_engine_as_it_was(tmp_path: Path) -> None:
    """The first experts that leave the device need threads and buffers."""
    task = Task(n_layers=3, clip=0.5, steps=2)
    model, run = task.model(), Run()
    with spilled(model, "gpu", tmp_path, host_memory=(1 << 30) + (1 << 16)) as engine:
        optimizer = adamw(model, task)
        for batches in task.batches():
            with pytest.raises(BudgetError):
                engine.set_residents([0, 0, 0])
            run.losses.append(train_step(model, optimizer, batches))
            run.norms.append(optimizer.total_norm or 0.0)
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


def test_micro_batches_that_begin_when_all_experts_are_resident_follow_plain_training(
    tmp_path: Path,
) -> None:
    """The sums need memory: some experts leave in the first backward."""
    task = Task(steps=4)
    runs = []
    for fill in (False, True):
        model, run = task.model(), Run()
        with spilled(model, "host with 5 slots", tmp_path, host_memory="2GiB") as engine:
            optimizer = adamw(model, task)
            if fill:
                memory = FakeMemory(engine, other=1 << 16)
                record = engine.layout.weight_bytes + engine.layout.state_bytes
                room = int(1.45 * len(engine.residents) * engine.experts.n_local * record)
                engine.memory.fill(memory, int((memory.peak() + room) / 0.98))
            for number, batches in enumerate(task.batches()):
                if fill and number == 2:
                    assert set(engine.residents) == {engine.experts.n_local}
                run.losses.append(train_step(model, optimizer, batches * (2 if number > 1 else 1)))
                if number == 0:
                    observe_passes(model, batches[0])
            assert not fill or set(engine.residents) != {engine.experts.n_local}
            run.weights = weights_of(model)
        runs.append(run)
    assert_same_bits(*runs)
