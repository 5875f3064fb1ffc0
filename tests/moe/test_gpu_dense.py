"""On a GPU: dense weights and their optimizer states in host memory."""

import copy
import gc
import io

import pytest
import torch

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from tests.moe.gpu_training import CONFIG, batches, copies, delays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_roughly")]


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
