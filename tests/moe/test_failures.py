"""Gradients that are not finite and failures of worker threads are raised, once, in the caller."""

import errno
import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import overspill
from overspill.core.errors import DiskError, EngineError, NonFiniteError
from overspill.models.gpt import GPTMoE
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from tests.moe.oracle import (
    SOME_AT_HOME,
    Run,
    Task,
    adamw,
    assert_same_bits,
    delays,
    loss_of,
    losses_without,
    spilled,
    threads_left,
    train_step,
    weights_of,
)

TASK = Task(n_layers=2, steps=3)
CLIPPED = Task(n_layers=2, steps=3, clip=0.5)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not threads_left()
    assert not list(tmp_path.glob("overspill-*")), "files were left on the disk"


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_nan_with_clipping_updates_nothing_and_the_batch_can_be_skipped(
    where: str, tmp_path: Path
) -> None:
    expected = losses_without(CLIPPED, where, tmp_path, skip=1)
    model, losses = CLIPPED.model(), []
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, CLIPPED)
        for number, batch in enumerate(CLIPPED.batches()):
            if number == 1:
                before = weights_of(model)
                (loss_of(model, batch[0]) * float("nan")).backward()
                with pytest.raises(NonFiniteError, match="nothing was updated"):
                    optimizer.step()
                assert_same_bits(Run(weights=weights_of(model)), Run(weights=before))
                optimizer.zero_grad()
            else:
                losses.append(train_step(model, optimizer, batch))
    assert losses == expected


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("stepped", [False, True])
def test_nan_in_a_skipped_batch_is_not_raised_for_the_next(
    where: str, stepped: bool, tmp_path: Path
) -> None:
    """Also if experts of the skipped batch get no token in the next."""
    model = CLIPPED.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, CLIPPED)
        (tokens,) = next(CLIPPED.batches())
        (loss_of(model, tokens) * float("nan")).backward()
        if stepped:
            with pytest.raises(NonFiniteError, match="nothing was updated"):
                optimizer.step()
        optimizer.zero_grad()
        loss_of(model, tokens[:1, :2]).backward()
        optimizer.step()
        assert optimizer.total_norm is not None
        assert math.isfinite(optimizer.total_norm)


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_without_clipping_updates_nothing_with_it(
    where: str, value: float, tmp_path: Path
) -> None:
    model = TASK.model()
    # updates are delayed: step() must not rely on what they have found so far
    slow = Settings(inject=delays(seed=3, longest=0.01, only="optimizer"))
    with spilled(model, where, tmp_path, slow) as engine:
        optimizer = adamw(model, TASK)
        batch, *others = TASK.batches()
        train_step(model, optimizer, batch)
        before = weights_of(model)
        loss = loss_of(model, others[0][0]) * value
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            _backward_and_step(loss, optimizer)
        engine.flush()
        for name, weight in weights_of(model).items():
            if weight.dim() < 3:
                assert torch.equal(weight, before[name]), name
                continue
            for got, was in zip(weight, before[name], strict=True):
                # an expert without a token of the batch has decayed
                decayed = was * (1 - TASK.lr * TASK.weight_decay)
                assert torch.equal(got, was) or torch.allclose(got, decayed, rtol=1e-2), name
        # the batch can be skipped, also if the next one uses few of the experts
        optimizer.zero_grad()
        narrow = [torch.full((1, 3), 7)]
        for batch in (narrow, *others):
            assert math.isfinite(train_step(model, optimizer, batch))


def _backward_and_step(loss: Tensor, optimizer: overspill.AdamW) -> None:
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("bad", [0, 1])
def test_nan_in_one_micro_batch_is_raised_before_the_dense_weights_change(
    where: str, bad: int, tmp_path: Path
) -> None:
    model = TASK.model()
    slow = Settings(inject=delays(seed=3, longest=0.01, only="optimizer"))
    with spilled(model, where, tmp_path, slow):
        optimizer = adamw(model, TASK)
        tokens = next(TASK.batches())[0]
        before = model.embedding.weight.detach().clone()
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            _accumulate_with_nan(model, optimizer, tokens, bad)
        assert torch.equal(model.embedding.weight, before)


def _accumulate_with_nan(
    model: GPTMoE, optimizer: overspill.AdamW, tokens: Tensor, bad: int
) -> None:
    for number in range(3):
        with optimizer.accumulate() if number < 2 else nullcontext():
            (loss_of(model, tokens) * (float("nan") if number == bad else 1.0)).backward()
    optimizer.step()


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_nan_in_a_lower_layer_is_raised_after_upper_layers_were_updated(
    where: str, tmp_path: Path
) -> None:
    """In the last micro-batch, whose backward updates the upper layers first."""
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        (tokens,) = next(TASK.batches())
        before = model.embedding.weight.detach().clone()
        with optimizer.accumulate():
            loss_of(model, tokens).backward()
        model.blocks[0].register_full_backward_pre_hook(
            lambda _, grads: tuple(None if g is None else g * float("nan") for g in grads)
        )
        loss_of(model, tokens).backward()
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            optimizer.step()
        assert torch.equal(model.embedding.weight, before)
        optimizer.zero_grad()


def test_one_expert_with_a_nan_gradient_is_named(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 5 slots", tmp_path):
        optimizer = adamw(model, TASK)
        # the gradient of the lowest block becomes NaN
        model.blocks[0].register_full_backward_pre_hook(
            lambda _, grads: tuple(None if g is None else g * float("nan") for g in grads)
        )
        loss = loss_of(model, next(TASK.batches())[0])
        loss.backward()
        with pytest.raises(NonFiniteError, match="layer 0"):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("upload", "host with 2 slots"),
        pytest.param("upload", "disk behind 3 host slots", marks=pytest.mark.slow),
        ("download", "host with 5 slots"),
        ("optimizer", "host with 12 slots"),
        pytest.param("optimizer", "disk behind 9 host slots", marks=pytest.mark.slow),
        ("ssd read", "disk behind 3 host slots"),
        ("ssd write", "disk behind 3 host slots"),
    ],
)
@pytest.mark.parametrize(("clip", "after"), [(None, 25), (0.5, 0)])
def test_a_failed_job_is_raised_in_the_main_thread(
    kind: str, where: str, clip: float | None, after: int, tmp_path: Path
) -> None:
    seen = 0

    def fail(what: str) -> None:
        nonlocal seen
        if what == kind:
            seen += 1
            if seen > after:
                raise OSError(errno.EIO, "injected")

    task = Task(clip=clip, steps=4)
    model = task.model()
    with spilled(model, where, tmp_path, Settings(inject=fail), idle=False) as engine:
        optimizer = adamw(model, task)
        began = time.monotonic()
        # a download is issued by the main thread itself
        expected = OSError if kind == "download" else EngineError
        with pytest.raises(expected, match="injected"):
            _train_until_it_fails(model, optimizer, task, engine)
        if kind != "download":
            with pytest.raises(EngineError):
                engine.flush()  # and again
        assert time.monotonic() - began < 50, "not found by the watchdog"


@pytest.mark.parametrize("kind", ["upload", "ssd read"])
def test_a_model_for_training_refuses_to_go_on_when_transfers_work_again(
    kind: str, tmp_path: Path
) -> None:
    fails = True

    def fail(what: str) -> None:
        if fails and what == kind:
            raise OSError(errno.EIO, "injected")

    model, settings = TASK.model(), Settings(inject=fail)
    with spilled(model, "disk behind 3 host slots", tmp_path, settings, idle=False):
        (tokens,) = next(TASK.batches())
        for _ in range(3):
            with pytest.raises(EngineError, match="injected"), torch.no_grad():
                model(tokens)
            fails = False


def _train_until_it_fails(
    model: GPTMoE, optimizer: overspill.AdamW, task: Task, engine: Engine
) -> None:
    for batch in task.batches():
        train_step(model, optimizer, batch)
    engine.flush()


def test_a_disk_file_that_was_cut_is_a_disk_error(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "disk behind 3 host slots", tmp_path, idle=False) as engine:
        optimizer = adamw(model, TASK)
        train_step(model, optimizer, next(TASK.batches()))
        engine.flush()
        _truncate("weights.bin", tmp_path)
        with pytest.raises(DiskError, match=r"weights\.bin.*last checkpoint"):
            _train_until_it_fails(model, optimizer, TASK, engine)


def _truncate(name: str, folder: Path) -> None:
    """Truncates an open file of this process that has no name any more."""
    for fd in Path("/proc/self/fd").iterdir():
        target = os.readlink(fd) if fd.is_symlink() else ""
        if target.startswith(str(folder)) and name in target:
            os.truncate(fd, 0)
            return
    raise AssertionError(f"{name} is not open")
