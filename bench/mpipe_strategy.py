"""Which strategy restores the activations of partitions that share memory."""

import dataclasses
import itertools

from mpipe_layers import LAYERS, RATES, Layer, Row, Setup, medians, show
from record import Metric, metric, write_record

from overspill.plan import reuse

REUSING = tuple(strategy.name for strategy in reuse.REUSING)
N = 4
"""Partitions."""


def strategy_times(setup: Setup, spec: Layer, tokens: int, rate: float) -> dict[str, float]:
    """Milliseconds of a step with each strategy, also without reuse."""
    exchange = setup.link(rate)
    works = {
        name: spec.step(spec.build(exchange, partitions=N, strategy=name), tokens)
        for name in reuse.STRATEGIES
    }
    return medians(works, spec.device)


def measured_speeds(setup: Setup, spec: Layer, tokens: int, rate: float) -> reuse.Speeds:
    """Speeds that a layer measures in its first step to choose its strategy. A CPU measures
    nothing: its speeds are made up, for smoke tests."""
    layer = spec.build(setup.link(rate), partitions=N)
    spec.step(layer, tokens)()
    if setup.smoke:
        return reuse.Speeds(1e12, rate * 1e9, 1e10)
    assert layer.speeds is not None
    return layer.speeds


def selection(spec: Layer, speeds: reuse.Speeds, ms: dict[str, float]) -> tuple[Row, list[float]]:
    """The best strategy and the selected ones as columns, and times above the best in percent: of
    the present model, of equation 10, and of each strategy if it is always used."""
    best = min(REUSING, key=lambda name: ms[name])
    names = [
        reuse.cheapest(spec.shape, speeds, spec.dtype.itemsize, model=model).name
        for model in (reuse.cost, reuse.equation_10)
    ]
    above = [100 * (ms[name] / ms[best] - 1) for name in (*names, *REUSING)]
    columns = {
        "best": best,
        "selected": f"{names[0]}, {above[0]:.1f}% above",
        "by equation 10": f"{names[1]}, {above[1]:.1f}% above",
    }
    return columns, above


def strategy_figures(above: list[list[float]]) -> tuple[str, dict[str, Metric]]:
    """Comparison with other choices, as text, and the metrics."""
    good = [sum(share <= 5 for share in shares) for shares in zip(*above, strict=True)]
    always = ", ".join(f"{name} {n}" for name, n in zip(REUSING, good[2:], strict=True))
    compare = (
        f"within 5% in {good[0]} of {len(above)} settings; equation 10: {good[1]}; always the "
        f"same: {always}"
    )
    shares = [*zip(*above, strict=True)]
    return compare, {"above": metric(shares[0], "%"), "equation 10": metric(shares[1], "%")}


def strategy(setup: Setup) -> None:
    table, above, measured = [], [], []
    for spec, rate in itertools.product(setup.few(LAYERS, 1), setup.few(RATES)):
        spec = setup.layer(spec)
        tokens = spec.tokens // 2
        ms = strategy_times(setup, spec, tokens, rate)
        speeds = measured_speeds(setup, spec, tokens, rate)
        columns, shares = selection(spec, speeds, ms)
        table.append(
            {
                "layer": f"{spec.name}, {tokens:,} tokens",
                "link, GB/s": rate,
                **{f"{name}, ms": f"{ms[name]:.2f}" for name in ("none", *REUSING)},
                **columns,
            }
        )
        show(table[-1])
        above.append(shares)
        measured.append(dataclasses.asdict(speeds))
    compare, metrics = strategy_figures(above)
    config = {
        "row": "selected memory reusing strategy, time above the best measured one",
        "compare": compare,
        "partitions": N,
        "speeds": measured,
    }
    write_record("mpipe-strategy", config, metrics, None, setup.out, table)
