"""Small budgets go on, and an engine goes when the last who could use it goes."""

import gc
import math
import queue
import threading
from pathlib import Path

import pytest
import torch

import overspill
from overspill.core.errors import OrderError
from overspill.core.experts import ExpertId
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.offload import _close
from tests.moe.oracle import Task, adamw, loss_of, spilled, threads_left, train_step

CONFIG = GPTConfig(
    vocab=32, n_layers=2, d_model=16, d_hidden=16, n_heads=2, n_experts=8, top_k=2, max_seq=16
)


def batch() -> torch.Tensor:
    return torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("host_slots", [2, 4])
@pytest.mark.parametrize("slots", [2, 16])
def test_a_bank_longer_than_the_cache_of_host_rows_fills_and_empties(
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


def test_nothing_is_left_on_the_disk_even_while_it_runs(tmp_path: Path) -> None:
    model = GPTMoE(CONFIG, seed=1)
    overspill.offload(
        model, device="cpu", quiet=True, mode="disk", slots=4, host_slots=3, disk=tmp_path
    )
    assert model.overspill.bytes_by_tier()["disk"] > 0
    assert list(tmp_path.iterdir()) == [], "a killed run would leave its spill behind"
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
        assert moments.eq(0).all(), "a new optimizer begins without moments"


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("where", ["gpu", "host with 5 slots", "disk behind 3 host slots"])
def test_a_backward_that_failed_half_way_is_not_added_to_the_next(
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
            patch.setattr(engine, "end_backward", fail)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, tokens).backward()
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


@pytest.mark.parametrize("where", ["gpu", "host with 5 slots", "disk behind 3 host slots"])
def test_loaded_weights_are_the_masters_too(where: str, tmp_path: Path) -> None:
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


def test_frozen_experts_need_no_optimizer_of_ours(tmp_path: Path) -> None:
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


def test_an_engine_collected_in_one_of_its_own_threads_is_closed_by_another() -> None:
    """Such a thread may hold the lock that `close` waits for."""
    closed_by: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Engine:
        def close(self) -> None:
            closed_by.put(threading.current_thread().name)

    for name in ("overspill-loader", "somebody"):
        thread = threading.Thread(target=_close, args=(Engine(),), name=name)
        thread.start()
        thread.join()
        found = closed_by.get(timeout=10)
        assert (found == name) == (name == "somebody")
