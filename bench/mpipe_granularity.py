"""Numbers of partitions that layers choose, and the cost of the search for them."""

import operator
import statistics
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
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
    one_by_one,
    search,
    show,
)
from record import metric, write_record

import overspill
from overspill.parallel.exchange.interface import Exchange

RATE = 25
"""GB/s: a 200 Gbit/s port for each GPU, as in the paper's cluster."""
SEARCHES = 5
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)


class Search(NamedTuple):
    """Times of one adaptive layer and batch size, in milliseconds of a step."""

    chosen: int
    trials: list[float]
    """The steps in which the search ran, one by one."""
    as_many: list[float]
    """As many steps of a layer that has the chosen number from the beginning."""
    after: float
    """After the search."""

    @property
    def overhead(self) -> float:
        """Cost of the search, in percent of 100 steps with the chosen number."""
        return 100 * (sum(self.trials) - sum(self.as_many)) / (100 * self.after)


class Granularity(NamedTuple):
    """Milliseconds of a step for one batch size."""

    tokens: int
    fixed: dict[int, float]
    """Times with fixed numbers of partitions."""
    searches: list[Search]

    @property
    def best(self) -> int:
        return min(self.fixed, key=lambda n: self.fixed[n])

    def above(self, found: Search) -> float:
        """Percent that the adaptive layer takes longer than the best fixed one."""
        return 100 * (found.after / self.fixed[self.best] - 1)


def measure(
    spec: Layer, tokens: int, exchange: Exchange, adaptive: Sequence[overspill.MoELayer]
) -> Granularity:
    """All layers are timed in the same way: steps of the search one by one, as those they are
    compared with; afterwards all in turns."""
    works: dict[Hashable, Work] = {}
    for n in NUMBERS:
        works[n] = spec.step(spec.build(exchange, partitions=n, strategy="none"), tokens)
        milliseconds(works[n], spec.device)  # compiles kernels and allocates memory
    searches = []
    for number, layer in enumerate(adaptive):
        works[f"adaptive {number}"] = work = spec.step(layer, tokens)
        trials = search(layer, work, tokens, spec.device)
        chosen = layer.best_partitions(tokens)
        assert chosen is not None
        fixed = spec.step(spec.build(exchange, partitions=chosen, strategy="none"), tokens)
        as_many = one_by_one(fixed, spec.device, partial(operator.gt, len(trials)))
        searches.append(Search(chosen, trials, as_many, 0.0))
    # steps of small batches wait for the host, which other processes disturb
    times = medians(works, spec.device, rounds=9 if tokens > 8192 else 31)
    searches = [
        found._replace(after=times[f"adaptive {number}"]) for number, found in enumerate(searches)
    ]
    return Granularity(tokens, {n: times[n] for n in NUMBERS}, searches)


def measure_all(
    setup: Setup, spec: Layer, sizes: Sequence[int], searches: int = 1
) -> Iterator[Granularity]:
    """Adaptive layers, each of which learns from the batch sizes before."""
    exchange = setup.link(RATE)
    adaptive = [spec.build(exchange, strategy="none") for _ in range(searches)]
    for tokens in map(setup.batch, sizes):
        yield measure(spec, tokens, exchange, adaptive)


def granularity_row(spec: Layer, found: Granularity) -> Row:
    searches = found.searches
    above = [found.above(each) for each in searches]
    overhead = [each.overhead for each in searches]
    return {
        "layer": spec.name,
        "tokens": f"{found.tokens:,}",
        **{f"n = {n}, ms": f"{found.fixed[n]:.2f}" for n in NUMBERS},
        "chosen n": ", ".join(str(each.chosen) for each in searches),
        "adaptive, ms": f"{statistics.median(each.after for each in searches):.2f}",
        "above the best": f"{statistics.median(above):.1f}% (at most {max(above):.1f}%)",
        "trials": ", ".join(str(len(each.trials)) for each in searches),
        "search, of 100 steps": f"{statistics.median(overhead):.2f}%",
    }


def granularity(setup: Setup) -> None:
    table, all_found = [], []
    n_searches = len(setup.few(range(SEARCHES)))
    for spec in map(setup.layer, (GPT_XL, W1)):
        for found in measure_all(setup, spec, setup.few(TOKENS), n_searches):
            table.append(granularity_row(spec, found))
            show(table[-1])
            all_found.append(found)
    searches = [(found, each) for found in all_found for each in found.searches]
    best = sum(each.chosen == found.best for found, each in searches)
    config = {
        "row": "adaptive number of partitions, time above the best fixed one",
        "compare": f"{RATE} GB/s; {n_searches} layers, medians of these; the best number is chosen "
        f"in {best} of {len(searches)} searches",
    }
    metrics = {
        "above the best": metric([found.above(each) for found, each in searches], "%"),
        "search, of 100 steps": metric([each.overhead for _, each in searches], "%"),
    }
    write_record("mpipe-granularity", config, metrics, None, setup.out, table)
