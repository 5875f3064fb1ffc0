"""How many partitions are chosen, and what the search for them costs."""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from mpipe_layers import (
    GPT_XL,
    NUMBERS,
    W1,
    Layer,
    Row,
    Setup,
    Work,
    medians,
    milliseconds,
    search,
    show,
)
from record import metric, write_record

import overspill
from overspill.parallel.exchange.interface import Exchange

RATE = 25
"""GB/s: a 200 Gbit/s port for each GPU, as in the paper's cluster."""
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)


class Granularity(NamedTuple):
    """Milliseconds of a step for one batch size."""

    tokens: int
    fixed: dict[int, float]
    """By the number of partitions."""
    chosen: int
    adaptive: float
    """After the search."""
    trials: list[float]
    """Of the steps in which the search ran, one by one."""
    as_many: list[float]
    """Of as many first steps of a new layer that has the chosen number from the beginning."""

    @property
    def best(self) -> int:
        return min(self.fixed, key=lambda n: self.fixed[n])

    @property
    def above(self) -> float:
        """Percent that the adaptive layer takes longer than the best fixed one."""
        return 100 * (self.adaptive / self.fixed[self.best] - 1)

    @property
    def overhead(self) -> float:
        """What the search has cost, in percent of 100 steps with the chosen number."""
        return 100 * (sum(self.trials) - sum(self.as_many)) / (100 * self.adaptive)


def measure(
    spec: Layer, tokens: int, exchange: Exchange, adaptive: overspill.MoELayer
) -> Granularity:
    """All layers are timed in the same way: steps of the search one by one, as those they are
    compared with; afterwards all in turns."""
    works: dict[Hashable, Work] = {"adaptive": spec.step(adaptive, tokens)}
    for n in NUMBERS:
        works[n] = spec.step(spec.build(exchange, partitions=n, strategy="none"), tokens)
        milliseconds(works[n], spec.device)  # compiles kernels and allocates memory
    trials = search(adaptive, works["adaptive"], tokens, spec.device)
    chosen = adaptive.best_partitions(tokens)
    assert chosen is not None
    settled = spec.step(spec.build(exchange, partitions=chosen, strategy="none"), tokens)
    as_many = [milliseconds(settled, spec.device) for _ in trials]
    times = medians(works, spec.device, rounds=9)
    fixed = {n: times[n] for n in NUMBERS}
    return Granularity(tokens, fixed, chosen, times["adaptive"], trials, as_many)


def measure_all(setup: Setup, spec: Layer, sizes: Sequence[int]) -> Iterator[Granularity]:
    """One adaptive layer, which learns from the batch sizes before."""
    exchange = setup.link(RATE)
    adaptive = spec.build(exchange, strategy="none")
    for tokens in map(setup.batch, sizes):
        yield measure(spec, tokens, exchange, adaptive)


def granularity_row(spec: Layer, found: Granularity) -> Row:
    return {
        "layer": spec.name,
        "tokens": f"{found.tokens:,}",
        **{f"n = {n}, ms": f"{found.fixed[n]:.2f}" for n in NUMBERS},
        "adaptive": f"n = {found.chosen}, {found.adaptive:.2f} ms",
        "above the best": f"{found.above:.1f}%",
        "trials": len(found.trials),
        "search, of 100 steps": f"{found.overhead:.2f}%",
    }


def granularity(setup: Setup) -> None:
    table, all_found = [], []
    for spec in map(setup.layer, (GPT_XL, W1)):
        for found in measure_all(setup, spec, setup.few(TOKENS)):
            table.append(granularity_row(spec, found))
            show(table[-1])
            all_found.append(found)
    best = sum(found.chosen == found.best for found in all_found)
    config = {
        "row": "adaptive number of partitions, time above the best fixed one",
        "compare": f"{RATE} GB/s; the best is chosen in {best} of {len(table)}",
    }
    metrics = {
        "above the best": metric([found.above for found in all_found], "%"),
        "search, of 100 steps": metric([found.overhead for found in all_found], "%"),
    }
    write_record("mpipe-granularity", config, metrics, None, setup.out, table)
