"""Restoring the activations of a partition in backward, if partitions share memory: the strategies
of MPipeMoE (Table II), and their cost (equation 10).

T_DI is the dispatched input of the experts, T_M the result of their first matrix, T_DO their
output. Shapes: B token rows, M (d_model), H (d_hidden), n partitions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertShape


class Restore(StrEnum):
    """Source of an activation in backward."""

    KEEP = "keep"
    """The activation stays on the device; partitions do not share its memory."""
    OFFLOAD = "offload"
    """The activation is copied to host memory in forward, and back in backward."""
    REPEAT = "repeat"
    """The activation is sent again (T_DI), or computed again (T_M)."""


class Strategy(NamedTuple):
    name: str
    dispatched: Restore
    """The source of T_DI."""
    middle: Restore
    """The source of T_M."""

    @property
    def copies(self) -> bool:
        return Restore.OFFLOAD in (self.dispatched, self.middle)


STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("none", Restore.KEEP, Restore.KEEP),
        Strategy("S1", Restore.OFFLOAD, Restore.OFFLOAD),
        Strategy("S2", Restore.REPEAT, Restore.OFFLOAD),
        Strategy("S3", Restore.OFFLOAD, Restore.REPEAT),
        Strategy("S4", Restore.REPEAT, Restore.REPEAT),
    )
}
REUSING = tuple(strategy for strategy in STRATEGIES.values() if strategy.name != "none")


def strategy_named(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise ConfigError(f"strategy={name!r} must be one of {', '.join(STRATEGIES)}, or None")
    return STRATEGIES[name]


@dataclass(frozen=True)
class Speeds:
    """Speeds measured on this machine. A factor is the speed beside other work as a share of the
    speed alone."""

    compute: float
    """Floating-point operations per second of the experts' matrix products."""
    exchange: float
    """Bytes per second to the ranks that compute; infinite without an exchange."""
    copy: float
    """Bytes per second between the device and host memory."""
    exchange_beside_compute: float = 1.0
    exchange_beside_all: float = 1.0
    copy_beside_all: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"{name}={value} of the measured speeds must be above 0")


class Operations(NamedTuple):
    """The operations of one pass, in units of one matrix product B*H*M and of B*M elements."""

    products: float
    exchanges: float
    copies: float


def work(strategy: Strategy, shape: ExpertShape) -> tuple[Operations, Operations]:
    """Q of forward and of backward. For experts that are not gated, with H = 4 M: Table II."""
    first = shape.in_rows / shape.d_hidden  # 2 if gated: the first matrix has gate and up
    copied = (strategy.dispatched is Restore.OFFLOAD) * 1.0
    copied += (strategy.middle is Restore.OFFLOAD) * shape.in_rows / shape.d_model
    again = first * (strategy.middle is Restore.REPEAT)
    sent_again = 1.0 * (strategy.dispatched is Restore.REPEAT)
    forward = Operations(first + 1, 2.0, copied)
    return forward, Operations(2 * (first + 1) + again, 2.0 + sent_again, copied)


class _Seconds(NamedTuple):
    """Seconds of the three streams for one token row, each alone."""

    compute: float
    exchange: float
    copy: float


def _alone(q: Operations, shape: ExpertShape, speeds: Speeds, itemsize: int) -> _Seconds:
    row = shape.d_model * itemsize
    return _Seconds(
        q.products * 2 * shape.d_model * shape.d_hidden / speeds.compute,
        q.exchanges * row / speeds.exchange,
        q.copies * row / speeds.copy,
    )


def equation_10(strategy: Strategy, shape: ExpertShape, speeds: Speeds, itemsize: int) -> float:
    """Seconds of forward and backward for one token row: the slowest of the three streams, of which
    exchange and copies are slowed down all the time."""
    slowed = speeds.exchange_beside_all if strategy.copies else speeds.exchange_beside_compute
    total = 0.0
    for q in work(strategy, shape):
        compute, exchange, copy = _alone(q, shape, speeds, itemsize)
        total += max(compute, exchange / slowed, copy / speeds.copy_beside_all)
    return total


def cost(strategy: Strategy, shape: ExpertShape, speeds: Speeds, itemsize: int) -> float:
    """Equation 10 with one change: a stream slows another one down only while both are busy. Copies
    that take a tenth of the exchange's time cannot slow down the other nine tenths."""
    by_compute = 1 / speeds.exchange_beside_compute - 1
    by_copies = max(0.0, 1 / speeds.exchange_beside_all - 1 - by_compute)
    by_others = 1 / speeds.copy_beside_all - 1
    total = 0.0
    for q in work(strategy, shape):
        compute, exchange, copy = _alone(q, shape, speeds, itemsize)
        slowed = by_compute * min(compute, exchange) + by_copies * min(copy, exchange)
        copy += by_others * min(copy, max(compute, exchange))
        total += max(compute, exchange + slowed, copy)
    return total


_ALIKE = 1.05
"""Costs are nearly the same if none is more than this many times the lowest."""
Model = Callable[[Strategy, ExpertShape, Speeds, int], float]


def cheapest(
    shape: ExpertShape,
    speeds: Speeds,
    itemsize: int,
    among: Sequence[Strategy] = REUSING,
    model: Model = cost,
) -> Strategy:
    """The strategy with the lowest cost; of those with nearly the same the one that copies least:
    copies take host memory, and time of the host, which no cost contains."""
    costs = {strategy: model(strategy, shape, speeds, itemsize) for strategy in among}
    alike = [strategy for strategy in among if costs[strategy] <= _ALIKE * min(costs.values())]

    def rank(strategy: Strategy) -> tuple[float, float]:
        return sum(q.copies for q in work(strategy, shape)), costs[strategy]

    return min(alike, key=rank)
