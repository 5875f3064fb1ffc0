"""A small task with frozen experts, plain PyTorch's results, and engines with CPU experts."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.models.gpt import GPTMoE
from overspill.moe.engine import Engine
from overspill.moe.settings import CpuPolicy, Settings
from tests.moe.oracle import Task, spilled

HOST = ["host with 2 slots", "host with 5 slots", "host with 12 slots"]
UPLOADERS = ["thread", "native"]


@dataclass(frozen=True)
class SmallTask(Task):
    """Its batches have 8 tokens, so no expert has more token rows than the CPU kernel takes. The
    experts of the layers `frozen` are not trained."""

    n_layers: int = 3
    frozen: tuple[int, ...] = (0, 1, 2)

    def model(self) -> GPTMoE:
        model = super().model()
        for layer in self.frozen:
            for parameter in model.moe_layers()[layer].expert_parameters():
                parameter.requires_grad_(False)
        return model

    def batches(self, first: int = 0) -> Iterator[list[Tensor]]:
        for batch in super().batches(first):
            yield [tokens[:1, :9] for tokens in batch]

    @property
    def tokens(self) -> Tensor:
        return next(iter(self.batches()))[0]


class Results(NamedTuple):
    logits: Tensor
    gradients: dict[str, Tensor]

    def assert_close(self, expected: "Results") -> None:
        torch.testing.assert_close(self.logits, expected.logits, rtol=1e-5, atol=1e-6)
        assert self.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(self.gradients[name], gradient, rtol=1e-4, atol=1e-7)

    def distance(self, other: "Results") -> float:
        """Largest difference of any tensor, relative to its norm."""
        pairs = [(self.logits, other.logits)]
        pairs += [(self.gradients[name], value) for name, value in other.gradients.items()]
        return max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)


def compute(model: GPTMoE, tokens: Tensor) -> Results:
    """The logits, and the gradients of all parameters that are not experts: the embedding has the
    input's."""
    model.zero_grad()
    logits = model(tokens[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    named = dict(model.named_parameters())
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    assert any("router" in name for name in gradients)
    assert any("embedding" in name for name in gradients)
    return Results(logits.detach(), gradients)


@functools.cache
def plain(task: SmallTask) -> Results:
    return compute(task.model(), task.tokens)


def cpu_settings(policy: CpuPolicy, **options: Any) -> Settings:
    return Settings(cpu_experts=True, cpu_policy=policy, **options)


@contextmanager
def traced(
    task: Task, where: str, disk: Path, settings: Settings, idle: bool = True
) -> Iterator[tuple[GPTMoE, Engine]]:
    model = task.model()
    with spilled(model, where, disk, settings, idle) as engine:
        engine.recorder.start()
        yield model, engine


def cpu_jobs(engine: Engine) -> list[str]:
    """As "forward 1: 0, 3": the layer, then its experts."""
    return [span.name for span in engine.recorder.spans() if span.row == "cpu compute"]


def uploads(engine: Engine) -> int:
    return engine.recorder.counters().get("upload", 0)
