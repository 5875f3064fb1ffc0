"""An offloaded model in several threads and processes: as plain PyTorch, or one error."""

import gc
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import overspill
from overspill.core.errors import OrderError
from overspill.moe.autograd import routed_experts
from overspill.moe.settings import Settings
from tests.moe.oracle import (
    HOME_OR_NOT,
    SOME_AT_HOME,
    Run,
    Task,
    adamw,
    assert_follows,
    delays,
    loss_of,
    plain_run,
    spilled,
    train_step,
    weights_of,
)
from tests.slow import slow_rows

TASK = Task(n_layers=2, steps=3)


def together(jobs: list[Callable[[], object]]) -> list[object]:
    """Runs the jobs in threads that start at the same time."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> object:
        barrier.wait(60)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(60) for future in [pool.submit(run, job) for job in jobs]]


@pytest.mark.parametrize(
    ("uploader", "where"),
    slow_rows(product(["thread", "native"], [*HOME_OR_NOT, "host with 5 slots"]), 1, 3, 5),
)
def test_threads_that_infer_at_once_get_the_logits_of_each_alone(
    where: str, uploader: str, tmp_path: Path
) -> None:
    if uploader == "native" and "disk" in where:
        pytest.skip("experts on disk have no native uploader")
    model = TASK.model().eval()
    batches = [torch.randint(48, (2, 9)) for _ in range(3)]
    with torch.no_grad():
        expected = [model(tokens).logits for tokens in batches]
    settings = Settings(inject=delays(seed=1, longest=1e-3), uploader=uploader)
    with spilled(model, where, tmp_path, settings):

        def infer(tokens: torch.Tensor) -> list[torch.Tensor]:
            with torch.no_grad():
                return [model(tokens).logits for _ in range(5)]

        found = together([lambda tokens=tokens: infer(tokens) for tokens in batches])
    for logits, alone in zip(found, expected, strict=True):
        assert isinstance(logits, list)
        for each in logits:
            torch.testing.assert_close(each, alone)


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_threads_that_accumulate_at_once_train_as_one(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=3, micro_batches=2, clip=clip)
    model, run = task.model(), Run()
    with spilled(model, where, tmp_path, Settings(inject=delays(seed=2, longest=1e-3))):
        optimizer = adamw(model, task)

        def accumulate(tokens: torch.Tensor) -> float:
            loss = loss_of(model, tokens) / 2
            loss.backward()
            return loss.item()

        for batches in task.batches():
            with optimizer.accumulate():
                jobs = [lambda tokens=tokens: accumulate(tokens) for tokens in batches]
                losses = together(jobs)
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(sum(losses))
            if optimizer.total_norm is not None:
                run.norms.append(optimizer.total_norm)
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_threads_that_take_steps_of_their_own_are_refused(where: str, tmp_path: Path) -> None:
    """Their updates would fall between the forward and the backward of each other."""
    model = TASK.model()
    with spilled(model, where, tmp_path, Settings(inject=delays(seed=3)), idle=False):
        optimizer = adamw(model, TASK)
        (tokens,) = next(TASK.batches())
        losses = together([lambda: loss_of(model, tokens)] * 2)

        def end(loss: torch.Tensor) -> None:
            loss.backward()
            optimizer.step()

        end(losses[0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            end(losses[1])


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("multithreading", [False, True])
def test_each_part_of_a_step_may_run_in_another_thread(
    where: str, multithreading: bool, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=3, checkpoint=True)
    model, run = task.model(), Run()

    def apart(job: Callable[[], object]) -> object:
        return together([job])[0]

    with (
        spilled(model, where, tmp_path),
        torch.autograd.set_multithreading_enabled(multithreading),
    ):
        optimizer = adamw(model, task)
        for (tokens,) in task.batches():
            loss = apart(lambda tokens=tokens: loss_of(model, tokens))
            assert isinstance(loss, torch.Tensor)
            apart(loss.backward)
            apart(optimizer.step)
            apart(optimizer.zero_grad)
            run.losses.append(loss.item())
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize("where", SOME_AT_HOME)
@pytest.mark.parametrize("training", [False, True])
def test_closing_in_another_thread_ends_a_pass_with_one_error(
    where: str, training: bool, tmp_path: Path
) -> None:
    model = TASK.model()
    began = threading.Event()
    hook = model.blocks[1].register_forward_hook(lambda *_: began.set())
    slow = Settings(inject=delays(seed=4, longest=2e-3))
    with spilled(model, where, tmp_path, slow, idle=False) as engine:
        optimizer = adamw(model, TASK)
        closer = threading.Thread(target=lambda: (began.wait(60), engine.close()))
        closer.start()
        with pytest.raises(OrderError, match=r"closed.* load the model again"):
            _run_for_ever(model, optimizer, training)
        closer.join(60)
        assert not closer.is_alive()
        for call in (optimizer.state_dict, model.state_dict, engine.flush):
            with pytest.raises(OrderError, match=r"closed.* load the model again"):
                call()
        engine.close()  # again
    hook.remove()


def _run_for_ever(model: torch.nn.Module, optimizer: overspill.AdamW, training: bool) -> None:
    while True:
        for batch in TASK.batches():
            if training:
                train_step(model, optimizer, batch)
            else:
                with torch.no_grad():
                    loss_of(model, batch[0])


# -- forked processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_a_forked_child_gets_one_error_and_ends(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path, Settings(inject=delays(seed=5))) as engine:
        optimizer = adamw(model, TASK)
        weights = {f"blocks.{n}.moe.w_in": torch.zeros(5, 48, 16) for n in range(2)}

        def forward() -> torch.Tensor:
            """The experts alone: other layers of torch may hang in a forked child."""
            x_TD, ids_TK = torch.ones(4, 16), torch.arange(4)[:, None]
            experts = model.moe_layers()[0].experts
            return routed_experts(experts, x_TD, ids_TK, torch.ones(4, 1)).sum()

        loss = forward()
        calls: list[Callable[[], object]] = [
            forward,
            loss.backward,
            optimizer.step,
            optimizer.zero_grad,
            optimizer.state_dict,
            lambda: model.state_dict(),
            lambda: model.load_state_dict(weights, strict=False),
            engine.flush,
        ]

        def child() -> None:
            for number, call in enumerate(calls):
                try:
                    call()
                except OrderError as error:
                    refused = "fork" in str(error)
                else:
                    refused = False
                if not refused:
                    os._exit(number + 2)
            engine.close()  # no-op

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        code = process.exitcode
        process.kill()
        assert code == 0, f"call {code - 2} did not raise" if code else "hangs"
        loss.backward()  # the parent goes on
        optimizer.step()


@pytest.mark.parametrize("mode", ["gpu", "host"])
def test_a_forked_child_that_frees_the_model_ends(mode: str) -> None:
    """As at its exit: the engine must not wait for threads and locks of the parent."""
    held = [TASK.model()]
    overspill.offload(held[0], device="cpu", mode=mode, quiet=True)
    engine, freed = held[0].overspill, weakref.ref(held[0])
    taken, go_on = threading.Event(), threading.Event()

    def compute() -> None:
        with engine.exclusive():
            taken.set()
            go_on.wait(60)

    def child() -> None:
        held.clear()
        gc.collect()
        os._exit(0 if freed() is None else 1)

    thread = threading.Thread(target=compute)
    thread.start()
    assert taken.wait(60)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    go_on.set()
    thread.join()
    engine.close()
    assert code == 0


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_workers_of_a_data_loader_read_while_the_model_trains(where: str, tmp_path: Path) -> None:
    model, run = TASK.model(), Run()
    batches = [tokens for (tokens,) in TASK.batches()]
    loader = DataLoader(batches, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        run.losses = [train_step(model, optimizer, [tokens]) for tokens in loader]
        run.weights = weights_of(model)
    assert_follows(run, plain_run(TASK))
