"""On a GPU: offloaded training follows plain training, also if every transfer is delayed."""

import copy
import gc
import io
import math
import random
import threading
import time
from pathlib import Path

import pytest
import torch

import overspill
from overspill.core.errors import NonFiniteError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.device_memory import CudaMemory
from overspill.moe.engine import Engine
from overspill.moe.memory_limit import MEMORY_LIMITS
from overspill.moe.settings import Settings
from overspill.plan.usage import Exchange
from overspill.simulate import routed_by
from overspill.transfer.streams import Inject
from tests.moe.fake_memory import FakeMemory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_roughly")]
CONFIG = GPTConfig(
    vocab=256,
    n_layers=4,
    d_model=128,
    d_hidden=256,
    n_heads=4,
    n_experts=8,
    top_k=2,
    gated=True,
    max_seq=64,
)
MODES = [
    {"mode": "gpu"},
    {"mode": "host", "slots": 2},
    {"mode": "host", "slots": 12, "dense_states": "host"},
    {"mode": "host", "slots": 6, "gpu_experts": 14},
    {"mode": "disk", "slots": 6, "host_slots": 5},
    {"mode": "disk", "slots": 6, "host_slots": 5, "gpu_experts": 14, "dense_weights": "host"},
]


def batches(steps: int, seed: int) -> list[torch.Tensor]:
    """They can be learnt: each token is the one before plus a small number."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.randint(0, 3, (steps, 16, 65), generator=generator)
    return list((jumps.cumsum(-1) % 256).cuda())


def plain(
    dtype: torch.dtype, clip: float | None, steps: int, seed: int, lr: float = 3e-3
) -> list[float]:
    """Plain PyTorch; bf16 weights are rounded from fp32 masters that torch's AdamW updates."""
    model = GPTMoE(CONFIG, seed=seed, device="cuda", dtype=dtype)
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=lr)
    losses = []
    for tokens in batches(steps, seed):
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses


def offloaded(
    dtype: torch.dtype,
    clip: float | None,
    steps: int,
    seed: int,
    settings: Settings,
    lr: float = 3e-3,
    move: bool = False,
    **where: object,
) -> list[float]:
    """With `move`, experts get other homes before every step."""
    model = GPTMoE(CONFIG, seed=seed, device="cuda", dtype=dtype)
    overspill.offload(model, gpu_memory="2GiB", settings=settings, quiet=True, **where)
    optimizer = overspill.AdamW(model, lr=lr, max_grad_norm=clip)
    losses, rng = [], random.Random(seed)
    try:
        for tokens in batches(steps, seed):
            if move:
                model.overspill.set_homes([rng.choice((0, 3, 8)) for _ in range(CONFIG.n_layers)])
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.overspill.check_conserved()
    finally:
        model.overspill.close()
    return losses


def delays(kind: str) -> None:
    """Delays the thread that issues a copy, and its stream."""
    time.sleep(random.random() * 1e-3)
    torch.cuda._sleep(int(random.random() * 1e6))


@pytest.mark.parametrize("where", MODES, ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("late", [False, True])
def test_fp32_follows_plain_training(
    where: dict[str, object], clip: float | None, late: bool, tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    settings = Settings(inject=delays if late else None)
    steps = 10
    want = plain(torch.float32, clip, steps, seed=5)
    got = offloaded(torch.float32, clip, steps, 5, settings, **where)
    assert got == pytest.approx(want, rel=2e-4)


STEPS, LR = 20, 1e-3  # early enough that rounding has not grown into another run


def final(losses: list[float]) -> float:
    return sum(losses[-4:]) / 4


@pytest.fixture(scope="module")
def two_plain_runs() -> tuple[float, float]:
    """Final losses of two plain runs that differ in their seed."""
    one, two = (plain(torch.bfloat16, 1.0, STEPS, seed, LR) for seed in (5, 6))
    return final(one), final(two)


@pytest.mark.parametrize("where", MODES, ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_bf16_ends_within_the_spread_of_two_plain_runs(
    where: dict[str, object], late: bool, two_plain_runs: tuple[float, float], tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    settings = Settings(inject=delays if late else None)
    losses = offloaded(torch.bfloat16, 1.0, STEPS, 5, settings, LR, **where)
    one, two = two_plain_runs
    assert final(losses) < 0.7 * losses[0]
    assert abs(final(losses) - one) <= abs(one - two), (final(losses), one, two)


@pytest.mark.parametrize("where", MODES, ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_experts_that_move_before_every_step_follow_plain_training(
    where: dict[str, object], clip: float | None, tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    want = plain(torch.float32, clip, 10, seed=5)
    got = offloaded(torch.float32, clip, 10, 5, Settings(inject=delays), move=True, **where)
    assert got == pytest.approx(want, rel=2e-4)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dense_weights", ["gpu", "host"])
def test_backward_of_experts_at_home_does_not_wait_for_the_gpu(
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


def copies(model: GPTMoE) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


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


def fill(engine: Engine, budget: int | None, gpu: type[CudaMemory] = CudaMemory) -> None:
    """As with mode "auto", which would keep all experts of so small a model on the GPU."""
    memory = MEMORY_LIMITS.set(engine, engine.device, budget, gpu(engine.device))
    engine.fill_memory(memory, memory.budget)


def test_memory_is_filled_with_experts_and_they_leave_it_before_a_larger_batch() -> None:
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.bfloat16)
    count = CONFIG.n_layers * CONFIG.n_experts
    record = 12 * 3 * CONFIG.d_model * CONFIG.d_hidden
    before = torch.cuda.memory_reserved()
    budget = before + (96 << 20) + count * record // 2
    overspill.offload(model, gpu_memory=budget, mode="host", slots=6)
    fill(model.overspill, budget)
    optimizer = overspill.AdamW(model, lr=1e-3)
    homes = []
    try:
        for size in [4] * 8 + [16] * 4:
            tokens = batches(1, seed=5)[0][:size]
            model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            homes.append(sum(model.overspill.homes))
            assert torch.cuda.memory_reserved() <= budget
        model.overspill.check_conserved()
    finally:
        model.overspill.close()
    assert homes[1] == 0
    assert homes[7] > 0


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
                assert engine.device_bytes() <= budget
        assert sum(engines[0].homes) > 0
        assert sum(engines[1].homes) == count
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
        assert sum(engines[0].homes) == count
        monkeypatch.setattr(SmallGpu, "size", torch.cuda.memory_reserved() + (16 << 20))
        second = trainee(None, SmallGpu)
        engines.append(second[0].overspill)
        fewer = sum(engines[0].homes)
        assert fewer < count, "at once"
        train_steps(12, first, second)
        assert sum(engines[0].homes) < count
        engines[1].close()
        for parameter in second[0].parameters():
            parameter.data = parameter.data.new_empty(0)
        train_steps(12, first)
        assert sum(engines[0].homes) > fewer
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


def accumulated(clip: float | None, room: float) -> tuple[list[float], int]:
    """Losses of steps with two micro-batches, and how many sums of gradients the GPU held."""
    model = GPTMoE(CONFIG, seed=5, device="cuda")
    overspill.offload(model, quiet=True, mode="host", slots=6)
    memory = FakeMemory(model.overspill, other=1 << 16)
    size = int(room * model.overspill.layout.weight_bytes)
    model.overspill.fill_memory(memory, int((memory.peak() + size) / 0.98))
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
        return losses, model.overspill.device_share.gradients
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
    engine.fill_memory(memory, int((memory.peak() + room) / 0.98))
    optimizer = overspill.AdamW(model, lr=3e-3, max_grad_norm=0.5)
    losses = []
    try:
        for tokens in batches(12, seed=5):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert engine.device_share.experts > engine.device_share.gradients
        engine.check_conserved()
    finally:
        engine.close()
    assert losses == pytest.approx(want, rel=2e-4)


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
        engine.fill_memory(memory, int((memory.peak() + count * record // 2) / 0.98))
    experts = [
        parameter
        for moe in model.moe_layers()
        for name, parameter in moe.named_parameters()
        if not name.startswith("router")
    ]
    for parameter in experts:
        parameter.requires_grad_(False)
    losses, homes = [], []
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
            homes.append(sum(model.overspill.homes) if offloaded else 0)
        if offloaded:
            assert homes[5] == count, "without states all experts fit"
            assert 0 < homes[6] < count
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


@pytest.mark.parametrize("uploader", ["thread", "native"])
@pytest.mark.parametrize("slots", [2, 12])
def test_both_uploaders_follow_plain_training_under_delays(uploader: str, slots: int) -> None:
    settings = Settings(inject=delays, uploader=uploader)
    want = plain(torch.float32, None, 10, seed=5)
    got = offloaded(torch.float32, None, 10, 5, settings, mode="host", slots=slots)
    assert got == pytest.approx(want, rel=2e-4)


def exchange(engine: Engine, rng: random.Random) -> None:
    """Experts at home and streamed ones of each layer exchange places."""
    pairs = []
    for layer, count in enumerate(engine.homes):
        streamed = rng.sample(range(count, CONFIG.n_experts), 2)
        pairs += [Exchange(layer, home, other) for home, other in enumerate(streamed)]
    engine.exchange_homes(pairs)


def frozen_gradients(
    dtype: torch.dtype, settings: Settings, exchanged: bool = False, **options: object
) -> list[torch.Tensor]:
    """The gradients of all parameters but the experts, over some small batches. With `exchanged`,
    experts exchange places before every forward and every backward."""
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
            if exchanged:
                exchange(engine, rng)
            loss = model(few[:, :-1], few[:, 1:]).loss
            if exchanged:
                exchange(engine, rng)
            loss.backward()
        engine.check_conserved()
        return [p.grad for p in model.parameters() if p.grad is not None]
    finally:
        model.overspill.close()


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
def test_experts_that_exchange_places_between_passes_give_the_same_gradients(
    where: dict[str, object], dtype: torch.dtype, cpu_experts: bool, tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    settings = Settings(inject=delays, cpu_experts=cpu_experts)
    want = frozen_gradients(dtype, Settings())
    got = frozen_gradients(dtype, settings, exchanged=True, **where)
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
    overspill.offload(model, gpu_memory="2GiB", quiet=True, **where)
    engine, tokens = model.overspill, batches(1, 0)[0][:, :-1]
    try:
        with torch.inference_mode(), routed_by(model, TwoExperts()):
            first = model(tokens).logits
            for _ in range(20):
                last = model(tokens).logits
        assert all({6, 7} <= set(experts) for experts in engine.at_home)
        torch.testing.assert_close(last, first, rtol=1e-2, atol=1e-2)
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), before[name]), name
        engine.flush()
        uploads = engine.recorder.counters()
        with torch.inference_mode(), routed_by(model, TwoExperts()):
            model(tokens)
        engine.flush()
        assert engine.recorder.counters() == uploads, "what is used is at home"
    finally:
        engine.close()


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


def dense_parameters(model: GPTMoE) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.numel() > 0]  # a placeholder of experts has none


def drawn_step(model: GPTMoE, optimizer: overspill.AdamW, seed: int) -> None:
    """Gradients that are drawn: those of a backward differ in bits from run to run."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for p in dense_parameters(model):
        p.grad = torch.randn(p.shape, generator=generator, device="cuda", dtype=p.dtype)
    torch.cuda._sleep(10**7)  # the host is ahead of the device
    optimizer.step()
    optimizer.zero_grad()


def dense_updates(
    dense: dict[str, str], dtype: torch.dtype, state_dtype: torch.dtype
) -> list[object]:
    """Weights and states after steps of two optimizers and of a loaded state."""
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=dtype)
    where = {"mode": "host", "slots": 4, "state_dtype": state_dtype, **dense}
    overspill.offload(model, gpu_memory="2GiB", quiet=True, **where)
    engine, used = model.overspill, []
    optimizer = overspill.AdamW(model, lr=1e-2)
    drawn_step(model, optimizer, 0)
    used.append(engine.bytes_by_tier()["host"])
    del optimizer
    optimizer = overspill.AdamW(model, lr=1e-2)
    for seed in (1, 2):
        drawn_step(model, optimizer, seed)
    optimizer.load_state_dict(optimizer.state_dict())
    drawn_step(model, optimizer, 3)
    used.append(engine.bytes_by_tier()["host"])
    assert used[0] == used[1], "memory is used again"
    values = [p.detach().cpu() for p in dense_parameters(model)]
    entries = optimizer.state_dict()["state"]
    values += [v for entry in entries.values() for v in entry.values() if torch.is_tensor(v)]
    engine.close()
    return values


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["dense_states", "dense_weights"])
def test_no_bit_depends_on_where_dense_parameters_are(
    what: str, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    on_gpu, on_host = (dense_updates({what: at}, dtype, state_dtype) for at in ("gpu", "host"))
    assert len(on_gpu) > 3 * CONFIG.n_layers
    for one, other in zip(on_gpu, on_host, strict=True):
        assert torch.equal(one, other)


def test_dense_states_in_host_memory_use_no_gpu_memory() -> None:
    grown = {}
    for dense_states in ("gpu", "host"):
        model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.bfloat16)
        where = {"mode": "host", "slots": 4, "dense_states": dense_states}
        overspill.offload(model, gpu_memory="2GiB", quiet=True, **where)
        optimizer = overspill.AdamW(model, lr=1e-2)
        before = torch.cuda.memory_allocated()
        drawn_step(model, optimizer, 0)
        torch.cuda.synchronize()
        grown[dense_states] = torch.cuda.memory_allocated() - before
        states = sum(10 * p.numel() for p in dense_parameters(model))
        model.overspill.close()
        del model, optimizer
    assert grown["gpu"] >= states
    assert grown["host"] < states // 100


def test_dense_states_in_host_memory_can_be_copied_and_saved() -> None:
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.bfloat16)
    where = {"mode": "host", "slots": 4, "dense_states": "host"}
    overspill.offload(model, gpu_memory="2GiB", quiet=True, **where)
    optimizer = overspill.AdamW(model, lr=1e-2)
    drawn_step(model, optimizer, 0)
    weight = model.embedding.weight
    state = optimizer.state[weight]["exp_avg"]
    assert (state.device, state.shape) == (weight.device, weight.shape)
    copies = [state.cpu(), state.clone().cpu(), copy.deepcopy(state).cpu()]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copies += [torch.load(file, map_location="cpu"), state.to("cpu", non_blocking=True)]
    torch.cuda.synchronize()
    assert copies[0].any()
    assert all(torch.equal(one, copies[0]) for one in copies)
    model.overspill.close()
    assert torch.equal(state.cpu(), copies[0]), "states outlive the engine"


# -- dense weights in host memory -------------------------------------------------------------

# dense weights and gradients of about 570 MB in bf16, a block of 8 MB, a head of 17 MB
DENSE_CONFIG = GPTConfig(
    vocab=8192,
    n_layers=32,
    d_model=1024,
    d_hidden=256,
    n_heads=8,
    n_experts=4,
    top_k=2,
    gated=True,
    max_seq=64,
)


def dense_run(gpu_memory: int, **where: object) -> tuple[list[float], int, str]:
    """Losses, the peak of allocated memory beside what was there, and where everything was."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = GPTMoE(DENSE_CONFIG, seed=5, dtype=torch.bfloat16, device="cpu")
    settings = Settings(residency=False)
    overspill.offload(
        model, gpu_memory=gpu_memory, device="cuda", settings=settings, quiet=True, **where
    )
    line = model.overspill.describe()
    optimizer = overspill.AdamW(model, lr=1e-4, max_grad_norm=1.0)
    losses = []
    torch.cuda.reset_peak_memory_stats()
    try:
        for tokens in batches(4, seed=5):
            tokens = tokens[:4]
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.overspill.check_conserved()
        return losses, torch.cuda.max_memory_allocated() - before, line
    finally:
        model.overspill.close()


def test_a_dense_part_that_the_budget_does_not_hold_trains_from_host_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    budget = torch.cuda.memory_reserved() + (400 << 20)
    losses, used, line = dense_run(budget)
    assert "; dense weights and gradients in host memory" in line
    assert used < 400 << 20
    want, most, line = dense_run(4 << 30, mode="host", slots=8, dense_weights="gpu")
    assert "dense weights" not in line
    assert most > 560_000_000
    assert losses == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("late", [False, True])
def test_dense_weights_in_host_memory_generate_the_tokens_of_the_plain_model(late: bool) -> None:
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.float32).eval()
    tokens = batches(1, seed=3)[0][:2, :8]
    with torch.no_grad():
        expected = model(tokens).logits
    settings = Settings(inject=delays if late else None)
    where = {"mode": "host", "slots": 8, "dense_weights": "host"}
    overspill.offload(model, gpu_memory="2GiB", settings=settings, quiet=True, **where)
    try:
        with torch.inference_mode():
            for _ in range(3):
                torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-4)
            assert model.generate(tokens, 4, temperature=0).shape == (2, 12)
    finally:
        model.overspill.close()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_of_dense_weights_in_host_memory_are_those_of_the_plain_model(
    checkpoint: bool,
) -> None:
    """Copies are late, and memory is used again at once."""
    plain_model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.float32)
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.float32, checkpoint=checkpoint)
    where = {"mode": "host", "slots": 8, "dense_weights": "host"}
    settings = Settings(inject=delays)
    overspill.offload(model, gpu_memory="2GiB", settings=settings, quiet=True, **where)
    optimizer = overspill.AdamW(model, lr=0.0, weight_decay=0.0, max_grad_norm=1e9)
    try:
        for tokens in batches(3, seed=4):
            for one in (plain_model, model):
                for tokens_half in tokens.chunk(2):
                    with optimizer.accumulate():
                        one(tokens_half[:, :-1], tokens_half[:, 1:]).loss.backward()
            for name, parameter in model.named_parameters():
                if parameter.numel():
                    want = plain_model.get_parameter(name).grad
                    torch.testing.assert_close(parameter.grad, want, rtol=2e-3, atol=1e-5)
            optimizer.step()
            optimizer.zero_grad()
            plain_model.zero_grad()
    finally:
        model.overspill.close()


def test_dense_weights_in_host_memory_can_be_copied_and_saved() -> None:
    model = GPTMoE(CONFIG, seed=5, device="cuda", dtype=torch.bfloat16)
    before = copies(model)
    where = {"mode": "host", "slots": 4, "dense_weights": "host"}
    overspill.offload(model, gpu_memory="2GiB", quiet=True, **where)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for weights in (copies(model), torch.load(file, map_location="cpu", weights_only=False)):
        assert weights.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(weights[name].cpu(), value.cpu()), name
    with torch.no_grad():
        model.norm.weight.fill_(3)
    assert model.norm.weight.cpu().eq(3).all()
    model.load_state_dict({name: value.cpu() for name, value in before.items()})
    model.overspill.close()
    for name, parameter in model.named_parameters():
        if parameter.numel():
            assert torch.equal(parameter.cpu(), before[name].cpu()), "weights outlive the engine"
