"""How much of an exchange is hidden, and how many partitions are chosen."""

import statistics
from pathlib import Path

import torch
from mpipe_layers import (
    DEVICE,
    GPT_XL,
    LAYERS,
    NUMBERS,
    RATES,
    W1,
    Layer,
    Row,
    milliseconds,
    show,
    step,
    timed,
)
from record import metric, write_record

import overspill
from overspill.compute.experts import StackedWeights, wave_backward, wave_forward
from overspill.parallel.exchange.interface import Exchange
from overspill.parallel.exchange.loopback import LoopbackExchange

GRANULARITY_RATE = 25


def computing(spec: Layer) -> float:
    """C: milliseconds of the experts alone, forward and backward."""
    layer = spec.build(None)
    weights = StackedWeights(layer.w_in.detach(), layer.w_out.detach())
    each = spec.tokens * spec.top_k // spec.experts
    counts = [each] * spec.experts
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
    x, dy = spec.rows(sum(counts)), spec.rows(sum(counts))
    row_weights = torch.ones(sum(counts), device=DEVICE)

    def work() -> None:
        _, hidden = wave_forward(x, weights, layer.shape, ends, counts)
        wave_backward(x, dy, row_weights, weights, layer.shape, ends, counts, hidden)

    return statistics.median(milliseconds(work))


def exchanging(spec: Layer, exchange: Exchange) -> float:
    """S + R: milliseconds of the exchanges alone, forward and backward."""
    rows = spec.rows(spec.tokens * spec.top_k)

    def work() -> None:
        arrivals = [exchange.send(rows, [len(rows)], [len(rows)]) for _ in range(4)]
        for arrival in arrivals:
            arrival.wait()

    return statistics.median(milliseconds(work))


def overlap_row(spec: Layer, rate: float, compute: float) -> tuple[Row, float, float, bool]:
    """A row of the table, the share that is hidden, the gain, and whether S + R is similar to C."""
    exchange = LoopbackExchange(DEVICE, rate)
    sending = exchanging(spec, exchange)
    times = {
        n: statistics.median(timed(spec, spec.tokens, exchange, partitions=n, strategy="none"))
        for n in NUMBERS
    }
    best = min(NUMBERS, key=lambda n: times[n])
    share = (times[1] - times[best]) / min(sending, compute)
    gain, similar = times[1] / times[best], 0.5 <= sending / compute <= 2
    row = {
        "layer": f"{spec.name}, {spec.tokens:,} tokens",
        "link, GB/s": rate,
        "S + R, ms": f"{sending:.2f}",
        "C, ms": f"{compute:.2f}",
        **{f"n = {n}, ms": f"{times[n]:.2f}" for n in NUMBERS},
        "gain": f"{gain:.2f}" + (" (similar)" if similar else ""),
        "hidden": f"{share:.0%}",
    }
    return row, share, gain, similar


def overlap(out: Path | None) -> None:
    table, hidden, gains, similar_gains = [], [], [], []
    for spec in LAYERS:
        compute = computing(spec)
        for rate in RATES:
            row, share, gain, similar = overlap_row(spec, rate, compute)
            show(row)
            table.append(row)
            hidden.append(100 * share)
            gains.append(gain)
            similar_gains += [gain] if similar else []
    config = {
        "row": "pipelined exchange over a throttled link: share of min(S + R, C) that is hidden",
        "compare": "more than 100%: making and adding up token rows is hidden too",
        "similar": "S + R between half and twice C",
    }
    metrics = {
        "hidden": metric(hidden, "%"),
        "gain where similar": metric(similar_gains or [1.0], "×"),
        "gain": metric(gains, "×"),
    }
    write_record("mpipe-overlap", config, metrics, None, out, table)


def granularity_row(
    spec: Layer, tokens: int, exchange: Exchange, adaptive: overspill.MoELayer
) -> tuple[Row, float, float]:
    """A row of the table, and in percent: the time above the best, the search in 100 steps."""
    fixed = {}
    for n in NUMBERS:
        work = step(
            spec.build(exchange, partitions=n, strategy="none"),
            spec.rows(tokens),
            spec.rows(tokens),
        )
        fixed[n] = statistics.median(milliseconds(work, rounds=6, calls=1))
    work = step(adaptive, spec.rows(tokens), spec.rows(tokens))
    search = []
    while adaptive.best_partitions(tokens) is None and len(search) < 40:
        search += milliseconds(work, rounds=1, warm=0, calls=1)
    chosen = adaptive.best_partitions(tokens) or 1
    found = statistics.median(milliseconds(work, rounds=6, calls=1))
    # the first pass is not counted: it allocates memory, with any number of partitions
    extra = sum(ms - found for ms in search[1:]) / found
    above = 100 * (found / min(fixed.values()) - 1)
    row = {
        "layer": spec.name,
        "tokens": f"{tokens:,}",
        **{f"n = {n}, ms": f"{fixed[n]:.2f}" for n in NUMBERS},
        "adaptive": f"n = {chosen}, {found:.2f} ms",
        "above the best": f"{above:.1f}%",
        "best": f"n = {min(fixed, key=lambda n: fixed[n])}",
        "trials": len(search),
        "search, of 100 steps": f"{extra:.2f}%",
    }
    return row, above, extra


def granularity(out: Path | None) -> None:
    table, ratios, overheads = [], [], []
    for spec in (GPT_XL, W1):
        exchange = LoopbackExchange(DEVICE, GRANULARITY_RATE)
        adaptive = spec.build(exchange, strategy="none")
        for tokens in (1024, 2048, 4096, 8192, 16384, 32768):
            row, above, extra = granularity_row(spec, tokens, exchange, adaptive)
            show(row)
            table.append(row)
            ratios.append(above)
            overheads.append(extra)
    chosen = sum(row["adaptive"].startswith(f"{row['best']},") for row in table)
    config = {
        "row": "adaptive number of partitions, time above the best fixed one",
        "compare": f"{GRANULARITY_RATE} GB/s; the best is chosen in {chosen} of {len(table)}",
    }
    metrics = {
        "above the best": metric(ratios, "%"),
        "search, of 100 steps": metric(overheads, "%"),
    }
    write_record("mpipe-granularity", config, metrics, None, out, table)
