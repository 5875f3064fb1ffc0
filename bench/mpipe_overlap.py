"""How much of an exchange is hidden behind compute."""

from collections.abc import Hashable
from typing import NamedTuple

import torch
from mpipe_layers import (
    LAYERS,
    NUMBERS,
    RATES,
    Layer,
    Row,
    Setup,
    Work,
    medians,
    search,
    show,
)
from record import metric, write_record

from overspill.compute.experts import StackedWeights, wave_backward, wave_forward
from overspill.parallel.exchange.interface import Exchange

_FAST = 25
"""GB/s from which on a link has more rounds: its steps are short."""


def computing(spec: Layer) -> Work:
    """C: the experts alone, forward and backward."""
    layer = spec.build(None)
    weights = StackedWeights(layer.w_in.detach(), layer.w_out.detach())
    each = spec.tokens * spec.top_k // spec.experts
    counts = [each] * spec.experts
    ends = torch.tensor(counts, device=spec.device).cumsum(0).to(torch.int32)
    x, dy = spec.rows(sum(counts)), spec.rows(sum(counts))
    row_weights = torch.ones(sum(counts), device=spec.device)

    def work() -> None:
        _, hidden = wave_forward(x, weights, layer.shape, ends, counts)
        wave_backward(x, dy, row_weights, weights, layer.shape, ends, counts, hidden)

    return work


def exchanging(spec: Layer, exchange: Exchange) -> Work:
    """S + R: the exchanges alone, forward and backward; each begins when the one before has
    arrived."""
    rows = spec.rows(spec.tokens * spec.top_k)

    def work() -> None:
        for _ in range(4):
            exchange.send(rows, [len(rows)], [len(rows)]).wait()

    return work


class Overlap(NamedTuple):
    """Milliseconds of one setting."""

    sending: float
    """S + R alone."""
    computing: float
    """C alone."""
    local: float
    """A step without exchange."""
    one: float
    """A step with one partition."""
    best: float
    """Time with the best fixed number of partitions."""
    adaptive: float
    """Time with the number that the layer has chosen."""

    @property
    def gain(self) -> float:
        """Gain of the layer with its own choice: below 1 if it has chosen badly."""
        return self.one / self.adaptive

    @property
    def hidden(self) -> float:
        """The share of the smaller one of S + R and C that is saved at best, compared with an
        exchange beside which nothing is computed. One partition computes the gradients of weights
        beside its last R."""
        return (self.local + self.sending - self.best) / min(self.sending, self.computing)

    @property
    def similar(self) -> bool:
        return 0.5 <= self.sending / self.computing <= 2


def overlap_row(setup: Setup, spec: Layer, rate: float) -> tuple[Row, Overlap]:
    """All are timed in turns: a GPU that does nothing but compute lowers its clock."""
    exchange = setup.link(rate)
    adaptive, local = (spec.build(link, strategy="none") for link in (exchange, None))
    works: dict[Hashable, Work] = {
        "adaptive": spec.step(adaptive, spec.tokens),
        "local": spec.step(local, spec.tokens),
        "C": computing(spec),
        "S + R": exchanging(spec, exchange),
    }
    search(adaptive, works["adaptive"], spec.tokens, spec.device)
    for n in NUMBERS:
        fixed = spec.build(exchange, partitions=n, strategy="none")
        works[n] = spec.step(fixed, spec.tokens)
    times = medians(works, spec.device, rounds=5 if rate < _FAST else 15)
    best = min(times[n] for n in NUMBERS)
    alone = times["S + R"], times["C"], times["local"]
    found = Overlap(*alone, times[1], best, times["adaptive"])
    row = {
        "layer": f"{spec.name}, {spec.tokens:,} tokens",
        "link, GB/s": rate,
        "S + R, ms": f"{found.sending:.2f}",
        "C, ms": f"{found.computing:.2f}",
        "no exchange, ms": f"{found.local:.2f}",
        **{f"n = {n}, ms": f"{times[n]:.2f}" for n in NUMBERS},
        "adaptive": f"n = {adaptive.best_partitions(spec.tokens)}, {times['adaptive']:.2f} ms",
        "gain of adaptive": f"{found.gain:.2f}" + (" (similar)" if found.similar else ""),
        "hidden by the best n": f"{found.hidden:.0%}",
    }
    return row, found


def overlap(setup: Setup) -> None:
    table, all_found = [], []
    for spec in map(setup.layer, setup.few(LAYERS, 1)):
        for rate in setup.few(RATES):
            row, found = overlap_row(setup, spec, rate)
            show(row)
            table.append(row)
            all_found.append(found)
    config = {
        "row": "pipelined exchange over a throttled link: share of min(S + R, C) that is hidden",
        "compare": "hidden: S + R and a step without exchange, minus the best n; more than 100%: "
        "making and adding up token rows is hidden too",
        "similar": "S + R between half and twice C",
    }
    similar = [found.gain for found in all_found if found.similar]
    metrics = {
        "hidden": metric([100 * found.hidden for found in all_found], "%"),
        "gain": metric([found.gain for found in all_found], "×"),
        **({"gain where similar": metric(similar, "×")} if similar else {}),
    }
    write_record("mpipe-overlap", config, metrics, None, setup.out, table)
