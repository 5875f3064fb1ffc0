"""Layers that the benchmarks of the pipelined MoE layer measure, and how they time them.

A layer is that of one rank: of the paper's layers, with 64 experts on 64 GPUs, one expert; of W1's,
with 16 experts on 4 GPUs, four.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import overspill
from overspill.core.experts import ExpertShape
from overspill.parallel.exchange.interface import Exchange

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
RATES = (6, 12, 25, 50)
NUMBERS = (1, 2, 4, 8)
Row = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    name: str
    d_model: int
    d_hidden: int
    experts: int
    top_k: int
    gated: bool
    tokens: int
    """Of a batch that takes some milliseconds: launches take as long for a small one."""

    def build(self, exchange: Exchange | None, **options: Any) -> overspill.MoELayer:
        return overspill.MoELayer(
            self.d_model,
            self.d_hidden,
            self.experts,
            self.top_k,
            activation="silu" if self.gated else "gelu",
            gated=self.gated,
            exchange=exchange,
            dtype=BF16,
            device=DEVICE,
            seed=1,
            **options,
        )

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(self.d_model, self.d_hidden, self.gated)

    def rows(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.d_model, device=DEVICE, dtype=BF16)


GPT_S = Layer("GPT-S", 768, 3072, 1, 1, gated=False, tokens=131072)
GPT_XL = Layer("GPT-XL", 2048, 8192, 1, 1, gated=False, tokens=32768)
W1 = Layer("W1", 1024, 4096, 4, 2, gated=True, tokens=32768)
LAYERS = (GPT_S, GPT_XL, W1)


def milliseconds(
    work: Callable[[], None], rounds: int = 3, warm: int = 1, calls: int = 2
) -> list[float]:
    """Of one call in each round, on the compute stream. Calls follow each other as steps of a
    training do: the host queues the next one while the GPU works."""
    found = []
    for number in range(warm + rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize()
        if number >= warm:
            found.append(float(begin.elapsed_time(end)) / calls)
    return found


def step(layer: overspill.MoELayer, x: Tensor, dy: Tensor) -> Callable[[], None]:
    x = x.detach().requires_grad_()

    def work() -> None:
        y, _ = layer(x)
        y.backward(dy)

    return work


def timed(spec: Layer, tokens: int, exchange: Exchange | None, **options: Any) -> list[float]:
    """Milliseconds of forward and backward."""
    layer = spec.build(exchange, **options)
    return milliseconds(step(layer, spec.rows(tokens), spec.rows(tokens)))


def show(row: Row) -> None:
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
