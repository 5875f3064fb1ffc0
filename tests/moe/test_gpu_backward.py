"""On a GPU: backward does not wait; gradients that are kept, added or not finite."""

import math
import threading
from pathlib import Path

import pytest
import torch

import overspill
from overspill.core.errors import NonFiniteError
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from overspill.transfer.streams import Inject
from tests.moe.fake_memory import FakeMemory
from tests.moe.gpu_training import CONFIG, MODES, batches, copies, delays, plain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_roughly")]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dense_weights", ["gpu", "host"])
def test_backward_of_resident_experts_does_not_wait_for_the_gpu(
    dense_weights: str, moments: torch.dtype, accumulate: bool, clip: float | None
) -> None:
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.bfloat16)
    where = {"mode": "gpu", "dense_weights": dense_weights}
    overspill.offload(model, gpu_memory="2GiB", quiet=True, **where)
    optimizer = overspill.AdamW(model, lr=1e-3, max_grad_norm=clip, state_dtype=moments)
    try:
        for tokens in batches(4, seed=5):  # the first ones compile kernels and allocate memory
            if accumulate:
                with optimizer.accumulate():
                    model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)  # about a second
            loss.backward()
            waited = torch.cuda.current_stream().query()
            optimizer.step()
            optimizer.zero_grad()
        assert not waited
        assert math.isfinite(loss.item())
    finally:
        model.overspill.close()


@pytest.mark.parametrize("where", MODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_loss_changes_nothing_and_training_goes_on(
    where: dict[str, object], dtype: torch.dtype, tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=dtype)
    overspill.offload(model, gpu_memory="2GiB", quiet=True, **where)
    # in the first step, and without decay: an expert without a token does not change either
    optimizer = overspill.AdamW(model, lr=1e-3, weight_decay=0.0)
    try:
        before = copies(model)
        bad, *others = batches(4, seed=5)
        (model(bad[:, :-1], bad[:, 1:]).loss * float("nan")).backward()
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            optimizer.step()
        optimizer.zero_grad()
        for name, value in copies(model).items():
            assert torch.equal(value, before[name]), name
        losses = []
        for tokens in others:
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert all(map(math.isfinite, losses))
        assert all(bool(value.isfinite().all()) for value in copies(model).values())
    finally:
        model.overspill.close()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_in_a_lower_layer_is_reported_and_stops_the_updates_below(
    moments: torch.dtype,
) -> None:
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.bfloat16)
    overspill.offload(model, gpu_memory="2GiB", mode="gpu", quiet=True)
    optimizer = overspill.AdamW(model, lr=1e-2, state_dtype=moments)
    try:
        before = copies(model)
        model.blocks[1].register_full_backward_pre_hook(
            lambda _, grads: tuple(None if g is None else g * float("nan") for g in grads)
        )
        tokens = batches(1, seed=5)[0]
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        with pytest.raises(NonFiniteError, match="go on from the last checkpoint"):
            optimizer.step()
        after = copies(model)
        for name in ("w_in", "w_out"):
            layers = [f"blocks.{layer}.moe.{name}" for layer in range(CONFIG.n_layers)]
            changed = [not torch.equal(after[layer], before[layer]) for layer in layers]
            assert changed[2:] == [True, True]  # updated before the NaN came
            assert not changed[0]
            assert all(bool(after[layer].isfinite().all()) for layer in (layers[0], *layers[2:]))
    finally:
        model.overspill.close()


def accumulated(clip: float | None, room: float) -> tuple[list[float], int]:
    """Losses of steps with two micro-batches, and how many sums of gradients the GPU held."""
    model = GPTMoE(CONFIG, seed=5, device="cuda")
    overspill.offload(model, quiet=True, mode="host", slots=6)
    memory = FakeMemory(model.overspill, other=1 << 16)
    size = int(room * model.overspill.layout.weight_bytes)
    model.overspill.memory.fill(memory, int((memory.peak() + size) / 0.98))
    optimizer = overspill.AdamW(model, lr=3e-3, max_grad_norm=clip)
    losses = []
    try:
        for first, second in zip(batches(10, seed=5), batches(10, seed=6), strict=True):
            with optimizer.accumulate():
                (model(first[:, :-1], first[:, 1:]).loss / 2).backward()
            loss = model(second[:, :-1], second[:, 1:]).loss / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.overspill.check_conserved()
        return losses, model.overspill.memory.share.gradients
    finally:
        model.overspill.close()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_added_on_the_gpu_are_those_added_by_the_cpu(clip: float | None) -> None:
    want, none = accumulated(clip, room=0.0)
    got, sums = accumulated(clip, room=16.5)
    assert none == 0
    assert sums > 0
    assert got == pytest.approx(want, rel=2e-4)


def late_reads(kind: str) -> None:
    """The main thread uploads kept gradients alone: each comes some milliseconds late."""
    if kind == "upload" and threading.current_thread() is threading.main_thread():
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        torch.cuda._sleep(10**7)


@pytest.mark.parametrize("inject", [None, delays, late_reads])
def test_clipped_gradients_that_wait_in_host_memory_follow_plain_training(
    inject: Inject | None,
) -> None:
    want = plain(torch.float32, 0.5, 12, seed=5)
    model = GPTMoE(CONFIG, seed=5, device="cuda")
    overspill.offload(model, quiet=True, mode="host", slots=6, settings=Settings(inject=inject))
    engine = model.overspill
    record = engine.layout.weight_bytes + engine.layout.state_bytes
    memory = FakeMemory(engine, other=1 << 16)
    room = CONFIG.n_layers * CONFIG.n_experts * record // 2
    engine.memory.fill(memory, int((memory.peak() + room) / 0.98))
    optimizer = overspill.AdamW(model, lr=3e-3, max_grad_norm=0.5)
    losses = []
    try:
        for tokens in batches(12, seed=5):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert engine.memory.share.experts > engine.memory.share.gradients
        engine.check_conserved()
    finally:
        engine.close()
    assert losses == pytest.approx(want, rel=2e-4)
