"""The same training twice: plain PyTorch, which is the oracle, and with offloaded experts."""

import dataclasses
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from tests.slow import slow_rows

N_EXPERTS = 5
STARVED = 2  # the expert that gets no token, if one is starved

WHERE: dict[str, dict[str, Any]] = {
    "gpu": {"mode": "gpu"},
    "host with 2 slots": {"mode": "host", "slots": 2},
    "host with 5 slots": {"mode": "host", "slots": 5},
    "host with 12 slots": {"mode": "host", "slots": 12},
    "host, 5 resident": {"mode": "host", "slots": 2, "gpu_experts": 5},
    "host, 7 resident": {"mode": "host", "slots": 2, "gpu_experts": 7},
    "disk behind 3 host slots": {"mode": "disk", "slots": 3, "host_slots": 3},
    "disk, 5 resident": {
        "mode": "disk",
        "slots": 3,
        "host_slots": 3,
        "gpu_experts": 5,
    },
    "disk behind 9 host slots": {"mode": "disk", "slots": 8, "host_slots": 9},
}
ONE_OF_EACH = ["gpu", "host with 2 slots", "disk, 5 resident"]
HOME_OR_NOT = ["gpu", "host, 5 resident"]
"""For what does not depend on tiers: all experts are resident, or some of them are streamed."""
SOME_AT_HOME = slow_rows(HOME_OR_NOT, 0)
"""The same for tests in which the engine does the same for all resident experts as for some."""
STREAMED = [name for name in WHERE if name not in HOME_OR_NOT]


@dataclass(frozen=True)
class Task:
    """A model, its data and its hyperparameters, wherever the experts are."""

    n_layers: int = 2
    top_k: int = 2
    gated: bool = True
    moe_every: int = 1
    checkpoint: bool = False
    starve: bool = False
    clip: float | None = None
    micro_batches: int = 1
    lr: float = 1e-2
    weight_decay: float = 0.1
    steps: int = 3
    dtype: torch.dtype = torch.float32
    tied: bool = True  # the head is the embedding

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(
            vocab=48,
            n_layers=self.n_layers,
            d_model=16,
            d_hidden=24,
            n_heads=2,
            n_experts=N_EXPERTS,
            top_k=self.top_k,
            gated=self.gated,
            moe_every=self.moe_every,
            max_seq=16,
            tie_embeddings=self.tied,
        )

    def model(self) -> GPTMoE:
        model = GPTMoE(self.config, checkpoint=self.checkpoint, seed=1, dtype=self.dtype)
        if self.starve:
            _starve(model)
        return model

    def batches(self, first: int = 0) -> Iterator[list[Tensor]]:
        """The micro-batches of each step from `first` on. They can be learnt: each token is the one
        before plus a small number."""
        for step in range(first, self.steps):
            generator = torch.Generator().manual_seed(1000 + step)
            jumps = torch.randint(0, 3, (self.micro_batches, 3, 13), generator=generator)
            starts = torch.randint(0, 48, (self.micro_batches, 3, 1), generator=generator)
            yield list((starts + jumps.cumsum(-1)) % 48)


@torch.no_grad()
def _starve(model: GPTMoE) -> None:
    """Freezes the routers so that expert `STARVED` never gets a token.

    Its logit is zero, and of two pairs of opposite logits two are above zero.
    """
    for moe in model.moe_layers():
        u, v = torch.randn(
            2, moe.router.weight.shape[1], generator=torch.Generator().manual_seed(7)
        )
        rows = [u, -u, v, -v]
        rows.insert(STARVED, torch.zeros_like(u))
        moe.router.weight.copy_(torch.stack(rows))
        moe.router.weight.requires_grad_(False)


@dataclass
class Run:
    """The results of a training."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def loss_of(model: GPTMoE, tokens: Tensor) -> Tensor:
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    assert loss is not None
    return loss


@torch.no_grad()
def observe_passes(model: GPTMoE, tokens: Tensor) -> None:
    """The passes that are observed before experts move to the device: with the next one they do.
    Without gradients, because these take a third of the time."""
    for _ in range(4):
        loss_of(model, tokens)


def weights_of(model: GPTMoE) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@functools.cache
def plain_run(task: Task) -> Run:
    """Plain PyTorch: torch.optim.AdamW and clip_grad_norm_ over stacked expert parameters."""
    model, run = task.model(), Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    for micro_batches in task.batches():
        losses = []
        for tokens in micro_batches:
            loss = loss_of(model, tokens) / len(micro_batches)
            loss.backward()
            losses.append(loss.item())
        if task.starve:
            assert all(not moe.w_in.grad[STARVED].any() for moe in model.moe_layers())
        if task.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            run.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(sum(losses))
    run.weights = weights_of(model)
    return run


def adamw(model: GPTMoE, task: Task, **options: Any) -> overspill.AdamW:
    options = {"lr": task.lr, "weight_decay": task.weight_decay, **options}
    return overspill.AdamW(model, max_grad_norm=task.clip, **options)


def train_step(model: GPTMoE, optimizer: overspill.AdamW, micro_batches: list[Tensor]) -> float:
    """One step as the design's interface shows it; returns the mean loss."""
    losses = []
    for number, tokens in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        with nullcontext() if last else optimizer.accumulate():
            loss = loss_of(model, tokens) / len(micro_batches)
            loss.backward()
            losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses)


def train(model: GPTMoE, optimizer: overspill.AdamW, task: Task, first: int = 0) -> Run:
    run = Run()
    for micro_batches in task.batches(first):
        run.losses.append(train_step(model, optimizer, micro_batches))
        if optimizer.total_norm is not None:
            run.norms.append(optimizer.total_norm)
    run.weights = weights_of(model)
    return run


def spilled_run(
    task: Task,
    where: str,
    disk: Path,
    settings: Settings | None = None,
    max_rows: int | None = None,
) -> Run:
    model = task.model()
    settings = dataclasses.replace(settings or Settings(), max_rows=max_rows)
    with spilled(model, where, disk, settings):
        return train(model, adamw(model, task), task)


@functools.cache
def streamed_run(task: Task) -> Run:
    """The bits that training has wherever experts are."""
    return spilled_run(task, "host with 2 slots", Path("unused"))


@contextmanager
def spilled(
    model: GPTMoE,
    where: str,
    disk: Path,
    settings: Settings | None = None,
    idle: bool = True,
    **options: Any,
) -> Iterator[Engine]:
    """Offloads the model and yields its engine. At the end all slots and buffers are accounted for
    (not with `idle` off, for failures), and no thread and no file is left."""
    settings = settings or Settings()
    settings = dataclasses.replace(settings, threads=settings.threads or 1)
    options = {**WHERE[where], **options}
    if options["mode"] == "disk":
        options["disk"] = disk
    overspill.offload(model, device="cpu", settings=settings, quiet=True, **options)
    engine = model.overspill
    assert isinstance(engine, Engine)
    try:
        yield engine
        if idle:
            engine.flush()
            engine.check_conserved()
    finally:
        engine.close()
    assert not threads_left()
    assert not list(disk.glob("overspill-*"))


def losses_without(task: Task, where: str, disk: Path, skip: int) -> list[float]:
    """The losses of a run that never saw batch `skip`."""
    model = task.model()
    with spilled(model, where, disk):
        optimizer = adamw(model, task)
        batches = [batch for number, batch in enumerate(task.batches()) if number != skip]
        return [train_step(model, optimizer, batch) for batch in batches]


def threads_left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("overspill-")]


def assert_follows(run: Run, plain: Run) -> None:
    """Losses agree to 1e-5, norms of parameters, and of each expert in them, to 1e-4."""
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-4)
    assert run.weights.keys() == plain.weights.keys()
    for name, expected in plain.weights.items():
        got = run.weights[name]
        assert got.shape == expected.shape, name
        assert got.norm().item() == pytest.approx(expected.norm().item(), rel=1e-4), name
        if expected.dim() == 3:
            norms = got.flatten(1).norm(dim=1).tolist()
            assert norms == pytest.approx(expected.flatten(1).norm(dim=1).tolist(), rel=1e-4), name


def assert_same_bits(run: Run, other: Run) -> None:
    assert run.losses == other.losses
    assert run.weights.keys() == other.weights.keys()
    for name, expected in other.weights.items():
        assert torch.equal(run.weights[name], expected), name


def delays(seed: int, longest: float = 3e-3, only: str = "") -> Callable[[str], None]:
    """Delays every transfer and optimizer job (or those whose kind starts with `only`) by a random
    time."""
    generator, lock = random.Random(seed), threading.Lock()

    def delay(kind: str) -> None:
        if kind.startswith(only):
            with lock:
                seconds = generator.random() * longest
            time.sleep(seconds)

    return delay
