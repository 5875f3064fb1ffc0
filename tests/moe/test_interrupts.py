"""Exceptions and Ctrl-C at any point of a step: nothing is leaked, and training goes on."""

import copy
import functools
import gc
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.core.errors import OrderError
from overspill.models.gpt import GPTMoE
from overspill.moe.residents import memory as homes_memory
from overspill.moe.settings import Settings
from overspill.moe.streaming import gradients as streaming_gradients
from tests.interrupts import calls_of, interrupted, spread
from tests.moe.oracle import (
    ONE_OF_EACH,
    SOME_AT_HOME,
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    loss_of,
    plain_run,
    spilled,
    train_step,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows

# of generators and finalizers that were interrupted
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TASK = Task(n_layers=2, steps=2)
CLIPPED = Task(n_layers=2, steps=2, clip=0.5)


@pytest.mark.parametrize(
    ("where", "uploader"),
    slow_rows(
        [("gpu", "thread"), ("host with 2 slots", "native"), ("disk, 5 resident", "thread")], 2
    ),
)
def test_an_interrupt_in_forward_leaves_nothing_behind(
    where: str, uploader: str, tmp_path: Path
) -> None:
    model, (tokens,) = TASK.model(), next(TASK.batches())
    expected = loss_of(model, tokens).item()
    with spilled(model, where, tmp_path, Settings(uploader=uploader)) as engine, torch.no_grad():
        loss_of(model, tokens)
        calls = calls_of(lambda: loss_of(model, tokens))
        for at in spread(calls, 10):
            interrupted(lambda: loss_of(model, tokens.flip(0)), at)
            assert loss_of(model, tokens).item() == pytest.approx(expected, rel=1e-6), at
        engine.check_conserved()


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("accumulate", slow_rows([False, True], 0))
def test_a_batch_whose_backward_was_interrupted_can_be_skipped(
    where: str, accumulate: bool, tmp_path: Path
) -> None:
    """With clipping nothing is updated during backward."""
    model, run = CLIPPED.model(), Run()
    first, *_ = CLIPPED.batches()
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, CLIPPED)

        def backward() -> None:
            loss = loss_of(model, first[0])
            if accumulate:
                with optimizer.accumulate():
                    loss.backward()
                loss = loss_of(model, first[0])
            loss.backward()

        calls = calls_of(backward)
        optimizer.zero_grad()
        for at in spread(calls, 6):
            interrupted(backward, at)
            optimizer.zero_grad()
        engine.check_conserved()
        for batches in CLIPPED.batches():
            run.losses.append(train_step(model, optimizer, batches))
            assert optimizer.total_norm is not None
            run.norms.append(optimizer.total_norm)
        run.weights = weights_of(model)
    assert_follows(run, plain_run(CLIPPED))


@pytest.mark.parametrize(
    "count", [pytest.param(4, id="few"), pytest.param(700, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("where", "clip", "reload"),
    slow_rows(
        [(where, *how) for where in ONE_OF_EACH for how in ((None, "states"), (0.5, "optimizer"))],
        0,
        2,
        5,
    ),
)
def test_after_an_interrupt_anywhere_in_a_step_training_goes_on_from_a_checkpoint(
    where: str, clip: float | None, reload: str, count: int, tmp_path: Path
) -> None:
    """With the states of a checkpoint, or with its weights and a new optimizer."""
    task = Task(n_layers=2, steps=2, clip=clip)
    model = task.model()
    first, second = task.batches()
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, task)
        train_step(model, optimizer, first)
        weights, states = weights_of(model), copy.deepcopy(optimizer.state_dict())

        def step() -> None:
            train_step(model, optimizer, second)

        def restore() -> None:
            nonlocal optimizer
            if reload == "optimizer":
                del optimizer
                gc.collect()
                optimizer = adamw(model, task)
            else:
                optimizer.load_state_dict(states)
            model.load_state_dict(weights)
            optimizer.zero_grad()

        restore()
        calls = calls_of(step)
        after = weights_of(model)
        restore()
        for at in spread(calls, count):
            interrupted(step, at)
            restore()
            engine.check_conserved()
            step()
            for name, weight in weights_of(model).items():
                # an update is of the size of the learning rate, 1e-2
                torch.testing.assert_close(weight, after[name], rtol=1e-4, atol=1e-6)
            restore()


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_whatever_follows_an_interrupted_step_says_what_to_do(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (tokens,) = CLIPPED.model(), next(CLIPPED.batches())
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, CLIPPED)
        start = weights_of(model)
        loss_of(model, tokens).backward()
        updates = itertools.count()

        def interrupt(*_: object) -> None:
            if next(updates) == 1:
                raise KeyboardInterrupt

        # in the middle of its updates
        for module, name in ((homes_memory, "RecordState"), (streaming_gradients, "Update")):
            made = functools.partial(_after, interrupt, getattr(module, name))
            monkeypatch.setattr(module, name, made)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        monkeypatch.undo()
        calls: tuple[Callable[[], object], ...] = (
            lambda: engine.training.check_between_steps("saved"),
            lambda: loss_of(model, tokens),
            optimizer.step,
            optimizer.zero_grad,
        )
        for call in 2 * calls:  # none of them makes the next one possible
            with pytest.raises(
                OrderError, match=r"step\(\) was interrupted .*load the last checkpoint"
            ):
                call()
        del optimizer, calls, call
        gc.collect()
        optimizer = adamw(model, CLIPPED)  # does not make the experts right
        with pytest.raises(OrderError, match="load the last checkpoint"):
            loss_of(model, tokens)
        model.load_state_dict(start)
        train_step(model, optimizer, [tokens])


def _after(
    first: Callable[[], object], made: Callable[..., object], *args: Any, **more: Any
) -> object:
    first()
    return made(*args, **more)


@pytest.mark.parametrize(
    ("where", "error", "clip"),
    slow_rows(
        all_pairs(
            ["host with 2 slots", "disk behind 3 host slots"],
            [KeyboardInterrupt, OSError],
            [None, 0.5],
        ),
        1,
        2,
    ),
)
def test_a_failed_download_leaks_no_buffer(
    where: str, error: type[BaseException], clip: float | None, tmp_path: Path
) -> None:
    """More failures than there are buffers; without clipping the first download fails."""
    task = Task(n_layers=2, steps=2, clip=clip)
    failures = 0

    def fail(kind: str) -> None:
        nonlocal failures
        if kind == "download" and failures:
            failures -= 1
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error("injected")

    model, run = task.model(), Run()
    with spilled(model, where, tmp_path, Settings(inject=fail)) as engine:
        optimizer = adamw(model, task)
        (tokens,) = next(task.batches())
        for _ in range(16):
            failures = 1
            with pytest.raises(error):
                loss_of(model, tokens).backward()
            with pytest.raises(OrderError, match=r"failed inside MoE layer 1; call opt\.zero_grad"):
                optimizer.step()
            optimizer.zero_grad()
        engine.check_conserved()
        run.losses = [train_step(model, optimizer, batches) for batches in task.batches()]
        run.weights = weights_of(model)
    expected = plain_run(task)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=1e-3, atol=1e-5)


class _Failure(torch.autograd.Function):
    """The identity; its backward raises while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if _Failure.armed:
            raise ArithmeticError("dense code failed")
        return grad


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_after_dense_code_failed_is_that_of_plain_pytorch(
    where: str, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts above have their gradients, those below have none."""
    task = Task(n_layers=2, clip=clip)
    (tokens,) = next(task.batches())

    def fail_and_step(model: GPTMoE, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        model.blocks[0].register_forward_hook(lambda _, __, out: _with_failure(out))
        loss = loss_of(model, tokens)
        monkeypatch.setattr(_Failure, "armed", True)
        with pytest.raises(ArithmeticError):
            loss.backward()
        monkeypatch.setattr(_Failure, "armed", False)
        if clip is not None and not isinstance(optimizer, overspill.AdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, tokens).backward()  # and the next batch trains all of them
        if clip is not None and not isinstance(optimizer, overspill.AdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return weights_of(model)

    plain = task.model()
    options = {"lr": task.lr, "weight_decay": task.weight_decay}
    expected = fail_and_step(plain, torch.optim.AdamW(plain.parameters(), **options))
    model = task.model()
    with spilled(model, where, tmp_path):
        found = fail_and_step(model, adamw(model, task))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5)


def _with_failure(out: Any) -> Any:
    return tuple(map(_Failure.apply, out)) if isinstance(out, tuple) else _Failure.apply(out)


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_a_backward_that_failed_before_its_first_update_can_be_dropped(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (tokens,) = TASK.model(), next(TASK.batches())
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, TASK)
        before = weights_of(model)
        waves = engine.compute.waves

        def fail(*_: object) -> None:
            raise MemoryError

        loss = loss_of(model, tokens)
        monkeypatch.setattr(engine.compute, "waves", fail)
        with pytest.raises(MemoryError):
            loss.backward()
        monkeypatch.setattr(engine.compute, "waves", waves)
        with pytest.raises(OrderError, match=r"failed inside MoE layer 1; call opt\.zero_grad"):
            loss_of(model, tokens)
        optimizer.zero_grad()
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=before))
        run = Run([train_step(model, optimizer, batches) for batches in TASK.batches()])
        run.weights = weights_of(model)
    assert_follows(run, plain_run(TASK))
