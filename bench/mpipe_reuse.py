"""The memory that partitions save, and which strategy restores their activations."""

import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
from mpipe_layers import BF16, DEVICE, GPT_XL, LAYERS, RATES, Layer, Row, show, step, timed
from record import Metric, metric, write_record

from overspill.parallel.exchange.loopback import LoopbackExchange
from overspill.plan import reuse

REUSING = tuple(strategy.name for strategy in reuse.REUSING)
STRATEGY_ROW = "selected memory reusing strategy, time above the best measured one"


def peak(spec: Layer, tokens: int, **options: Any) -> float:
    """Bytes of a training step with AdamW, its states included."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    layer = spec.build(LoopbackExchange(DEVICE), **options)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, fused=True)
    x, dy = spec.rows(tokens).requires_grad_(), spec.rows(tokens)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        y, _ = layer(x)
        y.backward(dy)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def memory(out: Path | None) -> None:
    spec, table, shares, savings = GPT_XL, [], [], []
    for tokens in (8192, 16384, 32768):
        none = peak(spec, tokens, partitions=1, strategy="none")
        for n, name in itertools.product((4, 8), REUSING):
            predicted = 2 * reuse.saved_memory(tokens, spec.d_model, spec.d_hidden, n)
            reused = peak(spec, tokens, partitions=n, strategy=name)
            share, saving = (none - reused) / predicted, 1 - reused / none
            shares.append(100 * share)
            savings += [100 * saving] if (tokens, n) == (16384, 8) else []
            row = {
                "tokens": f"{tokens:,}",
                "n": n,
                "strategy": name,
                "no reuse, MiB": f"{none / 2**20:,.0f}",
                "reuse, MiB": f"{reused / 2**20:,.0f}",
                "saved": f"{saving:.0%}",
                "of equation 5": f"{share:.0%}",
            }
            show(row)
            table.append(row)
    config = {
        "row": "peak of a training step of GPT-XL's layer with 16k tokens, saved by memory reuse",
        "compare": "against one partition that keeps its activations",
    }
    metrics = {
        "saved at 16k tokens": metric(savings, "%"),
        "of equation 5": metric(shares, "%"),
    }
    write_record("mpipe-memory", config, metrics, None, out, table)


def selection(spec: Layer, speeds: reuse.Speeds, ms: dict[str, float]) -> tuple[Row, list[float]]:
    """The best strategy and the selected ones as columns, and times above the best in percent: of
    the present model, of equation 10, and of each strategy if it is always used."""
    best = min(ms, key=lambda name: ms[name])
    names = [
        reuse.cheapest(spec.shape, speeds, BF16.itemsize, model=model).name
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
    """What to compare with, and the metrics."""
    good = [sum(share <= 5 for share in shares) for shares in zip(*above, strict=True)]
    always = ", ".join(f"{name} {n}" for name, n in zip(REUSING, good[2:], strict=True))
    compare = (
        f"within 5% in {good[0]} of {len(above)} settings; equation 10: {good[1]}; always the "
        f"same: {always}"
    )
    shares = [*zip(*above, strict=True)]
    return compare, {"above": metric(shares[0], "%"), "equation 10": metric(shares[1], "%")}


def strategy(out: Path | None) -> None:
    table, above, measured = [], [], []
    for spec, rate in itertools.product(LAYERS, RATES):
        tokens, exchange = spec.tokens // 2, LoopbackExchange(DEVICE, rate)
        ms = {
            name: statistics.median(timed(spec, tokens, exchange, partitions=4, strategy=name))
            for name in REUSING
        }
        layer = spec.build(exchange, partitions=4)
        step(layer, spec.rows(tokens), spec.rows(tokens))()
        assert layer.speeds is not None
        columns, shares = selection(spec, layer.speeds, ms)
        table.append(
            {
                "layer": f"{spec.name}, {tokens:,} tokens",
                "link, GB/s": rate,
                **{f"{name}, ms": f"{ms[name]:.2f}" for name in REUSING},
                **columns,
            }
        )
        show(table[-1])
        above.append(shares)
        measured.append(dataclasses.asdict(layer.speeds))
    compare, metrics = strategy_figures(above)
    config = {"row": STRATEGY_ROW, "compare": compare, "partitions": 4, "speeds": measured}
    write_record("mpipe-strategy", config, metrics, None, out, table)
