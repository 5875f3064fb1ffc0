"""On a GPU: frozen experts on the CPU, and experts that are swapped."""

import random
from pathlib import Path

import pytest
import torch

import overspill
from overspill.models.gpt import GPTMoE
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.plan.usage import Swap
from overspill.simulate import routed_by
from tests.moe.gpu_training import CONFIG, MODES, batches, delays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_roughly")]


def swap(engine: Engine, rng: random.Random) -> None:
    """Resident experts and streamed ones of each layer are swapped."""
    pairs = []
    for layer, count in enumerate(engine.residents):
        streamed = rng.sample(range(count, CONFIG.n_experts), 2)
        pairs += [Swap(layer, resident, other) for resident, other in enumerate(streamed)]
    engine.swap_experts(pairs)


def frozen_gradients(
    dtype: torch.dtype, settings: Settings, swapped: bool = False, **options: object
) -> list[torch.Tensor]:
    """The gradients of all parameters but the experts, over some small batches. With `swapped`,
    experts are swapped before every forward and every backward."""
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=dtype)
    for moe in model.moe_layers():
        moe.w_in.requires_grad_(False)
        moe.w_out.requires_grad_(False)
    where = {"gpu_memory": "2GiB", "mode": "host", "slots": 12, **options}
    overspill.offload(model, settings=settings, quiet=True, **where)
    engine, rng = model.overspill, random.Random(5)
    try:
        for tokens in batches(20, seed=5):
            few = tokens[:1, :25]
            if swapped:
                swap(engine, rng)
            loss = model(few[:, :-1], few[:, 1:]).loss
            if swapped:
                swap(engine, rng)
            loss.backward()
        engine.check_conserved()
        return [p.grad for p in model.parameters() if p.grad is not None]
    finally:
        model.overspill.close()


@pytest.mark.parametrize("where", [MODES[0], MODES[3], MODES[5], {"mode": "auto"}], ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_rest_is_trained_without_memory_for_states_of_frozen_experts(
    where: dict[str, object], clip: float | None, tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    losses: list[list[float]] = []
    for offloaded in (False, True):
        model = GPTMoE(CONFIG, seed=5, device="cuda")
        for moe in model.moe_layers():
            moe.w_in.requires_grad_(False)
            moe.w_out.requires_grad_(False)
        optimizer: torch.optim.Optimizer
        if offloaded:
            overspill.offload(model, gpu_memory="2GiB", quiet=True, **where)
            optimizer = overspill.AdamW(model, lr=3e-3, max_grad_norm=clip)
            before = model.overspill.bytes_by_tier()
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for tokens in batches(8, seed=5):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            if clip is not None and not offloaded:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    engine = model.overspill
    try:
        assert not engine.placement.trains_experts
        assert engine.bytes_by_tier()["disk"] <= before["disk"]
        engine.check_conserved()
    finally:
        engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_experts_on_the_cpu_give_the_gradients_of_the_gpu(
    dtype: torch.dtype, late: bool
) -> None:
    want = frozen_gradients(dtype, Settings())
    inject = delays if late else None
    got = frozen_gradients(dtype, Settings(cpu_experts=True, inject=inject))
    assert want
    near = 1e-4 if dtype == torch.float32 else 3e-2  # both sides round in another order
    for one, other in zip(got, want, strict=True):
        assert float((one - other).abs().max()) <= near * float(other.abs().max())


@pytest.mark.parametrize("where", [MODES[3], {**MODES[5], "dense_weights": "gpu"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cpu_experts", [False, True])
def test_experts_that_are_swapped_between_passes_give_the_same_gradients(
    where: dict[str, object], dtype: torch.dtype, cpu_experts: bool, tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    settings = Settings(inject=delays, cpu_experts=cpu_experts)
    want = frozen_gradients(dtype, Settings())
    got = frozen_gradients(dtype, settings, swapped=True, **where)
    assert want
    near = 1e-4 if dtype == torch.float32 else 3e-2
    for one, other in zip(got, want, strict=True):
        assert float((one - other).abs().max()) <= near * float(other.abs().max())


class TwoExperts:
    """A routing that uses the last two experts of each layer."""

    n_layers, n_experts, top_k = CONFIG.n_layers, CONFIG.n_experts, 2

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> torch.Tensor:
        ids = torch.arange(self.n_experts - 2, self.n_experts, device=device)
        return ids.expand(n_tokens, 2)


@pytest.mark.parametrize("where", [MODES[3], {**MODES[5], "dense_weights": "gpu"}], ids=str)
def test_the_most_used_experts_move_to_the_gpu(where: dict[str, object], tmp_path: Path) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    model = GPTMoE(CONFIG, seed=1, device="cuda", dtype=torch.bfloat16).eval()
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    settings = Settings(follow_usage=True)
    overspill.offload(model, gpu_memory="2GiB", quiet=True, settings=settings, **where)
    engine, tokens = model.overspill, batches(1, 0)[0][:, :-1]
    try:
        with torch.inference_mode(), routed_by(model, TwoExperts()):
            first = model(tokens).logits
            for _ in range(20):
                last = model(tokens).logits
        assert all({6, 7} <= set(experts) for experts in engine.addresses.resident)
        torch.testing.assert_close(last, first, rtol=1e-2, atol=1e-2)
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), before[name]), name
        engine.flush()
        uploads = engine.recorder.counters()
        with torch.inference_mode(), routed_by(model, TwoExperts()):
            model(tokens)
        engine.flush()
        assert engine.recorder.counters() == uploads, "what is used is resident"
    finally:
        engine.close()
