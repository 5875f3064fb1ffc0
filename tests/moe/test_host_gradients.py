"""With clipping, gradients of resident experts wait in host memory: no bit changes."""

import threading
from pathlib import Path

import pytest
import torch

from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.transfer.streams import Defer
from tests.fuzz.late import LateStream
from tests.moe.fake_memory import FakeMemory
from tests.moe.oracle import (
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
    streamed_run,
    train_step,
    weights_of,
)
from tests.slow import slow_rows

WHERE = "host with 5 slots"
TASKS = [
    Task(n_layers=2, steps=3, clip=0.5),
    Task(steps=3, clip=0.5, starve=True, top_k=1),
    Task(n_layers=2, steps=3, clip=0.5, dtype=torch.bfloat16, checkpoint=True),
]


def give_room(engine: Engine, experts: float) -> None:
    """Room for so many experts without their gradients."""
    memory = FakeMemory(engine, other=1 << 16)
    record = engine.layout.weight_bytes + engine.layout.state_bytes
    each = record + -(-2 * engine.layout.weight_bytes // engine.n_layers)
    engine.memory.fill(memory, int((memory.peak() + experts * each) / 0.98))


def unaccounted(engine: Engine) -> int:
    """Bytes of fp32 training on the device beside those that `memory.share` tells."""
    share = engine.memory.share
    numbers = 3 * share.experts + share.gradients  # weights, two moments; a gradient
    return engine.bytes_by_tier()["gpu"] - 4 * numbers * engine.layout.shape.numel


def clipped_run(task: Task, disk: Path, room: float, settings: Settings | None = None) -> Run:
    model, run = task.model(), Run()
    with spilled(model, WHERE, disk, host_memory="2GiB", settings=settings) as engine:
        optimizer = adamw(model, task)
        give_room(engine, room)
        for number, batches in enumerate(task.batches()):
            run.losses.append(train_step(model, optimizer, batches))
            run.norms.append(optimizer.total_norm or 0.0)
            if number == 0:
                observe_passes(model, batches[0])
        share = engine.memory.share
        assert share.experts >= 0.8 * int(room)
        assert share.gradients < share.experts, "some gradients are in host memory"
        engine.check_conserved()
        run.weights = weights_of(model)
    return run


@pytest.mark.parametrize(
    ("task", "room"),
    slow_rows([(TASKS[0], 4.5), (TASKS[0], 8.5), (TASKS[1], 9.5), (TASKS[2], 4.5)], 0),
    ids=str,
)
def test_clipping_follows_plain_training(task: Task, room: float, tmp_path: Path) -> None:
    run = clipped_run(task, tmp_path, room)
    assert_same_bits(run, streamed_run(task))
    if task.dtype == torch.float32:
        assert_follows(run, plain_run(task))


def test_delays_change_nothing(tmp_path: Path) -> None:
    run = clipped_run(TASKS[0], tmp_path, 7.5, Settings(inject=delays(seed=4)))
    assert_same_bits(run, streamed_run(TASKS[0]))


def test_updates_that_read_late_change_nothing(tmp_path: Path) -> None:
    """As on a GPU, step() returns before they have ended."""
    late, reads = LateStream("upload", seed=1, longest=1e-2), 0

    def inject(kind: str) -> Defer | None:
        nonlocal reads
        # other uploads are issued by the uploader
        if kind != "upload" or threading.current_thread() is not threading.main_thread():
            return None
        reads += 1
        return late.defer

    run = clipped_run(TASKS[0], tmp_path, 7.5, Settings(inject=inject))
    late.close()
    assert_same_bits(run, streamed_run(TASKS[0]))
    assert reads > 10


def _twice(task: Task, disk: Path, room: float | None) -> Run:
    """Steps whose graph has two passes."""
    model, run = task.model(), Run()
    with spilled(model, WHERE, disk, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        if room is not None:
            give_room(engine, room)
            observe_passes(model, next(task.batches())[0])
        for (tokens,) in task.batches():
            first, second = loss_of(model, tokens), loss_of(model, tokens.flip(0))
            (first + second).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(first.item())
        run.weights = weights_of(model)
    return run


def test_two_forwards_and_one_backward_add_up(tmp_path: Path) -> None:
    assert_same_bits(_twice(TASKS[0], tmp_path, 7.5), _twice(TASKS[0], tmp_path, None))


def test_dropped_gradients_leave_nothing(tmp_path: Path) -> None:
    """Also when micro-batches begin, which keeps all gradients on the device."""
    task = TASKS[0]
    runs = []
    for room in (None, 7.5):
        model, run = task.model(), Run()
        with spilled(model, WHERE, tmp_path, host_memory="2GiB") as engine:
            optimizer = adamw(model, task)
            if room is not None:
                give_room(engine, room)
                observe_passes(model, next(task.batches())[0])
            for number, (tokens,) in enumerate(task.batches()):
                loss_of(model, tokens).backward()
                optimizer.zero_grad()
                steps = [tokens] * (2 if number > 1 else 1)
                run.losses.append(train_step(model, optimizer, steps))
            run.weights = weights_of(model)
            engine.check_conserved()
        runs.append(run)
    assert_same_bits(*runs)


def test_another_optimizer_without_clipping_drops_what_an_unfinished_step_kept(
    tmp_path: Path,
) -> None:
    task = TASKS[0]
    losses = []
    for room in (None, 7.5):
        model = task.model()
        with spilled(model, WHERE, tmp_path, host_memory="2GiB") as engine:
            optimizer = adamw(model, task)
            if room is not None:
                give_room(engine, room)
            first, second, *_, (last,) = task.batches()
            train_step(model, optimizer, first)
            observe_passes(model, last)
            train_step(model, optimizer, second)
            loss_of(model, last).backward()
            optimizer = None
            optimizer = adamw(model, Task())
            found = [train_step(model, optimizer, [last])]
            engine.set_residents([1] * engine.n_layers)
            losses.append([*found, train_step(model, optimizer, [last])])
    assert losses[0] == losses[1]


def test_gradients_on_the_device_are_counted_after_residents_were_set(tmp_path: Path) -> None:
    task = TASKS[0]
    model = task.model()
    with spilled(model, WHERE, tmp_path, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        give_room(engine, 9.5)
        for batches in task.batches():
            observe_passes(model, batches[0])
            train_step(model, optimizer, batches)
        assert engine.memory.share.gradients > 0
        others = unaccounted(engine)
        engine.set_residents([1] * engine.n_layers)
        for batches in task.batches():
            assert unaccounted(engine) == others, engine.memory.share
            train_step(model, optimizer, batches)


def test_a_closed_engine_holds_no_memory_of_kept_gradients(tmp_path: Path) -> None:
    task = TASKS[0]
    model = task.model()
    with spilled(model, WHERE, tmp_path, host_memory="2GiB") as engine:
        optimizer = adamw(model, task)
        give_room(engine, 7.5)
        batches = next(task.batches())
        observe_passes(model, batches[0])
        train_step(model, optimizer, batches)
        assert engine.memory.share.experts > engine.memory.share.gradients
        loss_of(model, batches[0]).backward()
        optimizer.zero_grad()
    assert engine.bytes_by_tier()["gpu"] == 0
