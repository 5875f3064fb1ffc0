"""On a GPU: experts fill its memory, leave it for others, and stay within budgets."""

import pytest
import torch

import overspill
from overspill.models.gpt import GPTMoE
from overspill.moe.device_memory import CudaMemory
from overspill.moe.engine import Engine
from overspill.moe.memory_limit import MEMORY_LIMITS
from tests.moe.fake_memory import FakeMemory
from tests.moe.gpu_training import CONFIG, batches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_roughly")]


def fill(engine: Engine, budget: int | None, gpu: type[CudaMemory] = CudaMemory) -> None:
    """As with mode "auto", which would keep all experts of so small a model on the GPU."""
    memory = MEMORY_LIMITS.set(engine.memory, engine.device, budget, gpu(engine.device))
    engine.memory.fill(memory, memory.budget)


def test_memory_is_filled_with_experts_and_they_leave_it_before_a_larger_batch() -> None:
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.bfloat16)
    count = CONFIG.n_layers * CONFIG.n_experts
    record = 12 * 3 * CONFIG.d_model * CONFIG.d_hidden
    before = torch.cuda.memory_reserved()
    budget = before + (96 << 20) + count * record // 2
    overspill.offload(model, gpu_memory=budget, mode="host", slots=6)
    fill(model.overspill, budget)
    optimizer = overspill.AdamW(model, lr=1e-3)
    residents = []
    try:
        for size in [4] * 8 + [16] * 4:
            tokens = batches(1, seed=5)[0][:size]
            model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            residents.append(sum(model.overspill.residents))
            assert torch.cuda.memory_reserved() <= budget
        model.overspill.check_conserved()
    finally:
        model.overspill.close()
    assert residents[1] == 0
    assert residents[7] > 0


def trainee(
    budget: int | None, gpu: type[CudaMemory] = CudaMemory
) -> tuple[GPTMoE, overspill.AdamW]:
    """A model whose experts fill its budget, and its optimizer."""
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.bfloat16)
    overspill.offload(model, gpu_memory=budget, mode="host", slots=6, quiet=True)
    fill(model.overspill, budget, gpu)
    return model, overspill.AdamW(model, lr=1e-3)


def train_steps(count: int, *trainees: tuple[GPTMoE, overspill.AdamW]) -> None:
    """The models take turns."""
    tokens = batches(1, seed=5)[0][:4]
    for _ in range(count):
        for model, optimizer in trainees:
            model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_two_models_fill_memory_within_their_own_budgets() -> None:
    count = CONFIG.n_layers * CONFIG.n_experts
    record = 12 * 3 * CONFIG.d_model * CONFIG.d_hidden
    base = torch.cuda.memory_reserved() + (192 << 20)
    budgets = [base + count * record // 2, base + 2 * count * record]
    first, second = trainee(budgets[0]), trainee(budgets[1])
    engines = [first[0].overspill, second[0].overspill]
    try:
        for _ in range(12):
            train_steps(1, first, second)
            assert torch.cuda.memory_reserved() <= sum(budgets)
            for engine, budget in zip(engines, budgets, strict=True):
                assert engine.memory.device_bytes() <= budget
        assert sum(engines[0].residents) > 0
        assert sum(engines[1].residents) == count
        engines[1].close()
        train_steps(2, first)
        engines[0].check_conserved()
    finally:
        for engine in engines:
            engine.close()


class SmallGpu(CudaMemory):
    """A part of the GPU."""

    size = 1 << 40

    def available(self) -> int:
        return min(super().available(), self.size)


def test_experts_leave_for_a_model_that_is_offloaded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without budgets the models share what is free."""
    monkeypatch.setattr("overspill.moe.memory_limit.CudaMemory", SmallGpu)
    count = CONFIG.n_layers * CONFIG.n_experts
    first = trainee(None, SmallGpu)
    engines = [first[0].overspill]
    try:
        train_steps(12, first)
        assert sum(engines[0].residents) == count
        monkeypatch.setattr(SmallGpu, "size", torch.cuda.memory_reserved() + (16 << 20))
        second = trainee(None, SmallGpu)
        engines.append(second[0].overspill)
        fewer = sum(engines[0].residents)
        assert fewer < count, "at once"
        train_steps(12, first, second)
        assert sum(engines[0].residents) < count
        engines[1].close()
        for parameter in second[0].parameters():
            parameter.data = parameter.data.new_empty(0)
        train_steps(12, first)
        assert sum(engines[0].residents) > fewer
        engines[0].check_conserved()
    finally:
        for engine in engines:
            engine.close()


def test_filling_memory_leaves_the_peak_statistics_to_the_user() -> None:
    model, optimizer = trainee(torch.cuda.memory_reserved() + (512 << 20))
    try:
        large = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        del large
        peak = torch.cuda.max_memory_allocated()
        train_steps(8, (model, optimizer))
        assert torch.cuda.max_memory_allocated() >= peak
    finally:
        model.overspill.close()


def unfrozen(offloaded: bool, clip: float | None) -> list[float]:
    """Losses of a training whose experts are frozen in the first six steps. They fill half of the
    memory that they would need with their optimizer states."""
    model = GPTMoE(CONFIG, seed=5, device="cuda")
    optimizer: torch.optim.Optimizer
    if offloaded:
        overspill.offload(model, quiet=True, mode="host", slots=6)
        engine = model.overspill
        count, record = CONFIG.n_layers * CONFIG.n_experts, 4 * engine.layout.weight_bytes
        memory = FakeMemory(engine, other=1 << 16)
        engine.memory.fill(memory, int((memory.peak() + count * record // 2) / 0.98))
    experts = [
        parameter
        for moe in model.moe_layers()
        for name, parameter in moe.named_parameters()
        if not name.startswith("router")
    ]
    for parameter in experts:
        parameter.requires_grad_(False)
    losses, residents = [], []
    try:
        if offloaded:
            optimizer = overspill.AdamW(model, lr=3e-3, max_grad_norm=clip)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step, tokens in enumerate(batches(12, seed=5)):
            for parameter in experts:
                parameter.requires_grad_(step >= 6)
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            if clip is not None and not offloaded:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            residents.append(sum(model.overspill.residents) if offloaded else 0)
        if offloaded:
            assert residents[5] == count, "without states all experts fit"
            assert 0 < residents[6] < count
            engine.check_conserved()
    finally:
        if offloaded:
            model.overspill.close()
    return losses


@pytest.mark.parametrize("clip", [None, 0.5])
def test_frozen_experts_fill_memory_and_make_room_for_their_states_in_backward(
    clip: float | None,
) -> None:
    assert unfrozen(True, clip) == pytest.approx(unfrozen(False, clip), rel=2e-4)


def test_a_step_stays_within_the_gpu_budget() -> None:
    model = GPTMoE(CONFIG, seed=1, device="cuda", dtype=torch.bfloat16)
    overspill.offload(model, gpu_memory="512MiB", mode="host", slots=4, quiet=True)
    optimizer = overspill.AdamW(model, lr=1e-3)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for tokens in batches(3, 0):
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.cuda.max_memory_reserved() <= 512 << 20
    model.overspill.close()
