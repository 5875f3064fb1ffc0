"""Small budgets work, and an engine closes when nothing can use it any more."""

import copy
import gc
import math
import queue
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import overspill
from overspill.core.errors import OrderError
from overspill.core.experts import ExpertId
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from tests.moe.oracle import (
    SOME_AT_HOME,
    Run,
    Task,
    adamw,
    assert_follows,
    loss_of,
    plain_run,
    spilled,
    threads_left,
    train,
    train_step,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows

CONFIG = GPTConfig(
    vocab=32, n_layers=2, d_model=16, d_hidden=16, n_heads=2, n_experts=8, top_k=2, max_seq=16
)


def batch() -> torch.Tensor:
    return torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("slots", "host_slots", "clip"), slow_rows(all_pairs([2, 16], [2, 4], [None, 0.5]), 1, 2)
)
def test_a_bank_may_be_longer_than_the_cache_of_host_slots(
    slots: int, host_slots: int, clip: float | None, tmp_path: Path
) -> None:
    model = GPTMoE(CONFIG, seed=1)
    options = {"mode": "disk", "slots": slots, "host_slots": host_slots, "disk": tmp_path}
    overspill.offload(model, device="cpu", quiet=True, **options)
    optimizer = overspill.AdamW(model, lr=1e-3, max_grad_norm=clip)
    tokens = batch()
    for _ in range(2):
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert math.isfinite(model(tokens[:, :-1], tokens[:, 1:]).ce.item())
    model.overspill.check_conserved()
    model.overspill.close()


def test_dropping_model_and_optimizer_ends_the_threads(tmp_path: Path) -> None:
    model = GPTMoE(CONFIG, seed=1)
    overspill.offload(
        model, device="cpu", quiet=True, mode="disk", slots=4, host_slots=3, disk=tmp_path
    )
    optimizer = overspill.AdamW(model, lr=1e-3)
    tokens = batch()
    model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    optimizer.step()
    assert threads_left()
    del model
    gc.collect()
    assert threads_left(), "the optimizer still holds the experts"
    del optimizer
    gc.collect()
    assert not threads_left()


def test_files_on_the_disk_have_no_name_while_they_are_used(tmp_path: Path) -> None:
    model = GPTMoE(CONFIG, seed=1)
    overspill.offload(
        model, device="cpu", quiet=True, mode="disk", slots=4, host_slots=3, disk=tmp_path
    )
    assert model.overspill.bytes_by_tier()["disk"] > 0
    assert list(tmp_path.iterdir()) == [], "a killed run would leave its files behind"
    model.overspill.close()


@pytest.mark.parametrize("mode", ["gpu", "host"])
def test_a_model_offloaded_for_inference_says_that_it_cannot_be_trained(mode: str) -> None:
    model = GPTMoE(CONFIG, seed=1).eval()
    overspill.offload(model, device="cpu", quiet=True, mode=mode)
    with pytest.raises(OrderError, match=r"model\.train\(\) before offload"):
        overspill.AdamW(model)
    model.overspill.close()


@pytest.mark.parametrize("where", ["gpu", "host with 5 slots"])
def test_one_optimizer_at_a_time(where: str, tmp_path: Path) -> None:
    task = Task()
    model = task.model()
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, task)
        train_step(model, optimizer, next(task.batches()))
        with pytest.raises(OrderError, match="has an optimizer already"):
            adamw(model, task)
        del optimizer
        gc.collect()
        second = adamw(model, task)
        assert second.steps_taken == 0
        moments = torch.empty(engine.shape.numel)
        second.read_expert_state(ExpertId(0, 0), "exp_avg", moments)
        assert moments.eq(0).all(), "a new optimizer starts without moments"


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_a_backward_that_failed_is_not_added_to_the_next(
    where: str, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(clip=clip)
    model = task.model()
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, task)
        (tokens,) = next(task.batches())

        def fail(layer_pass: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine.training, "end_backward", fail)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, tokens).backward()
        with pytest.raises(OrderError, match="failed inside MoE layer"):
            optimizer.step()
        if clip is None:
            with pytest.raises(OrderError, match="updated during backward already"):
                optimizer.zero_grad()
            return
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
        norm = optimizer.total_norm
    other = task.model()
    with spilled(other, where, tmp_path):
        optimizer = adamw(other, task)
        loss_of(other, tokens).backward()
        optimizer.step()
        assert norm == optimizer.total_norm


@pytest.mark.parametrize("where", ["gpu", "host with 5 slots"])
def test_a_closed_engine_says_so(where: str, tmp_path: Path) -> None:
    task = Task()
    model = task.model()
    with spilled(model, where, tmp_path, idle=False) as engine:
        engine.close()
        for call in (
            model.state_dict,
            engine.flush,
            lambda: loss_of(model, torch.ones(1, 4).long()),
        ):
            with pytest.raises(OrderError, match="closed"):
                call()


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_loaded_weights_are_the_fp32_masters_too(where: str, tmp_path: Path) -> None:
    task = Task(dtype=torch.bfloat16)
    model = task.model()
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, task)
        train_step(model, optimizer, next(task.batches()))
        low = torch.empty(engine.shape.numel, dtype=torch.int16)
        engine.flush()
        optimizer.read_expert_state(ExpertId(0, 0), "low", low)
        assert low.ne(0).any()
        model.load_state_dict(model.state_dict())
        optimizer.read_expert_state(ExpertId(0, 0), "low", low)
        assert low.eq(0).all()


def test_frozen_experts_train_with_any_optimizer(tmp_path: Path) -> None:
    task = Task()
    model = task.model()
    with spilled(model, "host with 5 slots", tmp_path):
        for layer in model.moe_layers():
            layer.experts.requires_grad_(False)
        dense = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(dense, lr=1e-2)
        (tokens,) = next(task.batches())
        losses = []
        for _ in range(3):
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


def test_switching_clipping_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    task = Task(clip=0.5)
    model = task.model()
    with spilled(model, "host with 5 slots", tmp_path, idle=False):
        optimizer = adamw(model, task)
        (tokens,) = next(task.batches())
        loss_of(model, tokens).backward()
        optimizer.max_grad_norm = None
        with pytest.raises(OrderError, match="after step"):
            optimizer.step()


@pytest.mark.parametrize("kind", ["optimizer", "upload"])
def test_a_model_that_is_freed_in_a_thread_of_its_engine_is_closed_by_another(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread may hold the lock that `close` waits for, and `close` cannot join it."""
    held: list[object] = []
    armed, dropped = threading.Event(), threading.Event()
    freed_in: queue.SimpleQueue[str] = queue.SimpleQueue()
    closed_in: queue.SimpleQueue[str] = queue.SimpleQueue()

    def free(what: str) -> None:
        if what == kind and armed.is_set():
            armed.clear()
            assert dropped.wait(60)
            held.clear()
            gc.collect()
            if alive() is None:
                freed_in.put(threading.current_thread().name)

    model = Task(n_layers=2).model()
    alive = weakref.ref(model)
    settings = Settings(inject=free, threads=1)
    overspill.offload(model, device="cpu", mode="host", slots=2, quiet=True, settings=settings)
    close = model.overspill.close

    def noted_close() -> None:
        closed_in.put(threading.current_thread().name)
        close()

    monkeypatch.setattr(model.overspill, "close", noted_close)
    optimizer = overspill.AdamW(model, max_grad_norm=1.0)
    loss_of(model, next(Task().batches())[0]).backward()
    model.overspill.flush()  # gradients have arrived: step() will not wait for a thread
    armed.set()
    optimizer.step()  # updates the experts, then uploads them for the next forward
    held += [model, optimizer]
    del model, optimizer
    dropped.set()
    assert freed_in.get(timeout=60).startswith("overspill-")
    assert not closed_in.get(timeout=60).startswith("overspill-")
    deadline = time.monotonic() + 60
    while threads_left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads_left()


@pytest.mark.parametrize("where", SOME_AT_HOME)
def test_training_goes_on_from_states_loaded_after_a_failed_backward(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(steps=4)
    model, run = task.model(), Run()
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, task)
        first, *rest = task.batches()
        run.losses.append(train_step(model, optimizer, first))
        saved = weights_of(model), copy.deepcopy(optimizer.state_dict())

        def fail(layer_pass: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine.training, "end_backward", fail)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, rest[0][0]).backward()
        with pytest.raises(OrderError, match="load the last checkpoint"):
            optimizer.step()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        run.losses += [train_step(model, optimizer, batches) for batches in rest]
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


def test_a_model_offloaded_in_inference_mode_infers_and_trains() -> None:
    task = Task(steps=3)
    model = task.model()
    (tokens,) = next(task.batches())
    with torch.no_grad():
        expected = loss_of(model, tokens).item()
    with torch.inference_mode():
        overspill.offload(model, mode="host", slots=2, device="cpu", quiet=True)
        assert loss_of(model, tokens).item() == pytest.approx(expected, rel=1e-6)
    run = train(model, adamw(model, task), task)
    model.overspill.close()
    assert_follows(run, plain_run(task))
