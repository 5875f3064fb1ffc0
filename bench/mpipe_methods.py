"""The systems that the paper compares, on one GPU. MPipeMoE and its variant without memory reuse,
PipeMoE, are `overspill.MoELayer`; FastMoE and FasterMoE are schedules of `mpipe_baselines`."""

from dataclasses import dataclass
from functools import partial

from mpipe_baselines import PeerPieces, Synchronous
from mpipe_layers import Layer, Setup, Work, medians, search
from mpipe_peak import training_peak
from torch import nn

from overspill.parallel.exchange.interface import Exchange

FAST, FASTER = "FastMoE-like", "FasterMoE-like"
PIPE_1, PIPE_4 = "PipeMoE (n = 1)", "PipeMoE (n = 4)"
PIPE, MPIPE = "PipeMoE", "MPipeMoE"


@dataclass(frozen=True)
class Chosen:
    """How a layer computes, after it has searched."""

    method: str
    partitions: int = 1
    strategy: str = "none"

    def build(self, spec: Layer, exchange: Exchange) -> nn.Module:
        if self.method in (FAST, FASTER):
            kind = Synchronous if self.method == FAST else PeerPieces
            return kind(spec.build(None), exchange)
        return spec.build(exchange, partitions=self.partitions, strategy=self.strategy)


@dataclass(frozen=True)
class Comparison:
    """Methods for one layer and batch size over a link."""

    setup: Setup
    spec: Layer
    tokens: int
    rate: float

    def choose(self, method: str) -> Chosen:
        """Lets adaptive methods choose."""
        fixed = {PIPE_1: 1, PIPE_4: 4}
        if method not in (PIPE, MPIPE):
            return Chosen(method, fixed.get(method, 1))
        layer = self.spec.build(self.setup.link(self.rate), memory_reuse=method == MPIPE)
        search(layer, self.spec.step(layer, self.tokens), self.tokens, self.spec.device)
        partitions, strategy = layer.best_partitions(self.tokens), layer.strategy
        assert partitions is not None
        assert strategy is not None
        return Chosen(method, partitions, strategy)

    def milliseconds(self, methods: list[Chosen]) -> dict[str, float]:
        """Milliseconds of a forward and backward with each method."""
        exchange = self.setup.link(self.rate)
        works: dict[str, Work] = {
            chosen.method: self.spec.step(chosen.build(self.spec, exchange), self.tokens)
            for chosen in methods
        }
        return medians(works, self.spec.device)

    def peaks(self, methods: list[Chosen]) -> dict[str, int]:
        """Bytes of a training step with each. The link does not matter."""
        return {
            chosen.method: training_peak(
                self.spec, self.tokens, partial(chosen.build, self.spec, self.setup.link())
            )
            for chosen in methods
        }
