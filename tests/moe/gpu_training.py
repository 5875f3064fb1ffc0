"""A small model on a GPU, trained by plain PyTorch and offloaded."""

import random
import time

import torch

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings

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
    """With `move`, experts get other residents before every step."""
    model = GPTMoE(CONFIG, seed=seed, device="cuda", dtype=dtype)
    overspill.offload(model, gpu_memory="2GiB", settings=settings, quiet=True, **where)
    optimizer = overspill.AdamW(model, lr=lr, max_grad_norm=clip)
    losses, rng = [], random.Random(seed)
    try:
        for tokens in batches(steps, seed):
            if move:
                model.overspill.set_residents(
                    [rng.choice((0, 3, 8)) for _ in range(CONFIG.n_layers)]
                )
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


def copies(model: GPTMoE) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
