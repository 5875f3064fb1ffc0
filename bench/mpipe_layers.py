"""Layers that the benchmarks of the pipelined MoE layer measure, and how they time them.

A layer is that of one rank: of the paper's layers, with 64 experts on 64 GPUs, one expert; of W1's,
with 16 experts on 4 GPUs, four.
"""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from loopback import LoopbackExchange
from torch import Tensor, nn

import overspill
from overspill.core.experts import ExpertShape
from overspill.parallel.exchange.interface import Exchange
from overspill.transfer.streams import Timestamp

RATES = (6, 12, 25, 50)
NUMBERS = (1, 2, 4, 8)
MOST_TRIALS = 40
"""Steps after which a search counts as failed."""
GPU = torch.device("cuda")
_SMALLER = 1024  # a smoke test has so many times fewer tokens
Row = dict[str, Any]
Work = Callable[[], None]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    name: str
    d_model: int
    d_hidden: int
    experts: int
    top_k: int
    gated: bool
    tokens: int
    """Tokens of a batch that takes some milliseconds: launches take as long for a small one."""
    device: torch.device = GPU
    dtype: torch.dtype = torch.bfloat16

    def build(self, exchange: Exchange | None, **options: Any) -> overspill.MoELayer:
        return overspill.MoELayer(
            self.d_model,
            self.d_hidden,
            self.experts,
            self.top_k,
            activation="silu" if self.gated else "gelu",
            gated=self.gated,
            exchange=exchange,
            dtype=self.dtype,
            device=self.device,
            seed=1,
            **options,
        )

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(self.d_model, self.d_hidden, self.gated)

    def rows(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.d_model, device=self.device, dtype=self.dtype)

    def step(self, layer: nn.Module, tokens: int) -> Work:
        """A forward and backward of `layer`, with gradients of all that is trained."""
        x, dy = self.rows(tokens).requires_grad_(), self.rows(tokens)

        def work() -> None:
            layer.zero_grad()
            x.grad = None
            y, _ = layer(x)
            y.backward(dy)

        return work


GPT_S = Layer("GPT-S", 768, 3072, 1, 1, gated=False, tokens=131072)
BERT_L = Layer("BERT-L", 1024, 4096, 1, 1, gated=False, tokens=65536)
GPT_XL = Layer("GPT-XL", 2048, 8192, 1, 1, gated=False, tokens=32768)
W1 = Layer("W1", 1024, 4096, 4, 2, gated=True, tokens=32768)
LAYERS = (GPT_S, GPT_XL, W1)
PAPER = (GPT_S, BERT_L, GPT_XL)


@dataclass(frozen=True)
class Setup:
    """Where the benchmarks run: on a GPU, or as a smoke test on the CPU with tiny sizes."""

    out: Path | None = None
    """For records and pictures; None: where the repository has them."""
    smoke: bool = False

    def __post_init__(self) -> None:
        if not self.smoke and not torch.cuda.is_available():
            raise SystemExit("these benchmarks need a GPU; --smoke runs tiny sizes on the CPU")
        if self.smoke and self.out is None:
            raise SystemExit("--smoke needs --out: records of it must not replace measured ones")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.smoke else "cuda")

    def layer(self, spec: Layer) -> Layer:
        if not self.smoke:
            return spec
        return dataclasses.replace(
            spec,
            d_model=16,
            d_hidden=64,
            tokens=self.batch(spec.tokens),
            device=self.device,
            dtype=torch.float32,
        )

    def batch(self, tokens: int) -> int:
        return max(8, tokens // _SMALLER) if self.smoke else tokens

    def few(self, items: Sequence[T], most: int = 2) -> Sequence[T]:
        """All of them; at most so many for a smoke test."""
        return items[:most] if self.smoke else items

    def link(self, rate: float | None = None) -> LoopbackExchange:
        return LoopbackExchange(self.device, rate)


def milliseconds(work: Work, device: torch.device, calls: int = 1) -> float:
    """Milliseconds of one of `calls` calls, on the compute stream.

    They follow each other as steps of a training do: the host queues the next one while the GPU
    works.
    """
    begin = Timestamp(device)
    for _ in range(calls):
        work()
    end = Timestamp(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * begin.seconds_until(end) / calls


def medians(
    works: Mapping[K, Work], device: torch.device, rounds: int = 5, calls: int = 2
) -> dict[K, float]:
    """Milliseconds of one call of each function.

    All take turns, so that slow changes, such as the clock of the GPU, affect them alike; each
    round has another order, because a step that waits for the host depends on earlier work of the
    host. The first call of a turn does not count: caches have the data of other work. A CPU, for
    smoke tests, has one call.
    """
    found: dict[K, list[float]] = {key: [] for key in works}
    order, shuffle = list(works), random.Random(0).shuffle
    if device.type != "cuda":
        rounds = calls = 1
    for _ in range(rounds):
        shuffle(order)
        for key in order:
            if device.type == "cuda":
                works[key]()
            found[key].append(milliseconds(works[key], device, calls))
    return {key: statistics.median(times) for key, times in found.items()}


def median(work: Work, device: torch.device, rounds: int = 5) -> float:
    return medians({"": work}, device, rounds)[""]


def search(layer: overspill.MoELayer, work: Work, tokens: int, device: torch.device) -> list[float]:
    """Milliseconds of the steps until the layer has chosen its number of partitions."""

    def goes_on(steps: int) -> bool:
        if steps == MOST_TRIALS:
            raise RuntimeError(f"no number of partitions for {tokens} after {MOST_TRIALS} steps")
        return layer.best_partitions(tokens) is None

    return one_by_one(work, device, goes_on)


def one_by_one(work: Work, device: torch.device, goes_on: Callable[[int], bool]) -> list[float]:
    """Milliseconds of each call, on the compute stream; as in `milliseconds`, nothing waits for the
    device between them. `goes_on` gets the number of calls so far."""
    stamps = [Timestamp(device)]
    while goes_on(len(stamps) - 1):
        work()
        stamps.append(Timestamp(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [1e3 * begin.seconds_until(end) for begin, end in itertools.pairwise(stamps)]


def show(row: Row) -> None:
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
