"""The pipelined MoE layer on one GPU: token rows travel in a loop through pinned host memory, at
the speed of another machine's link.

PYTHONPATH=src python3 bench/mpipe.py overlap granularity memory strategy
PYTHONPATH=src python3 bench/mpipe.py timeline --out docs

A layer is that of one rank: of the paper's layers, with 64 experts on 64 GPUs, one expert; of W1's,
with 16 experts on 4 GPUs, four.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import metric, write_record
from torch import Tensor

import overspill
from overspill.compute.experts import StackedWeights, wave_backward, wave_forward
from overspill.parallel.exchange.interface import Exchange
from overspill.parallel.exchange.loopback import LoopbackExchange
from overspill.plan import reuse
from overspill.trace.picture import draw_timeline

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
RATES = (6, 12, 25, 50)
NUMBERS = (1, 2, 4, 8)
GRANULARITY_RATE = 25
REUSING = ("S1", "S2", "S3", "S4")
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


# -- mpipe-overlap ------------------------------------------------------------------------------


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


# -- mpipe-granularity --------------------------------------------------------------------------


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
    above = 100 * (fixed[chosen] / min(fixed.values()) - 1)
    row = {
        "layer": spec.name,
        "tokens": f"{tokens:,}",
        **{f"n = {n}, ms": f"{fixed[n]:.2f}" for n in NUMBERS},
        "adaptive": f"n = {chosen}, {found:.2f} ms",
        "above the best": f"{above:.1f}%",
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
    config = {
        "row": "adaptive number of partitions, time above the best fixed one",
        "compare": f"{GRANULARITY_RATE} GB/s; the search learns from the batch sizes before",
    }
    metrics = {
        "above the best": metric(ratios, "%"),
        "search, of 100 steps": metric(overheads, "%"),
    }
    write_record("mpipe-granularity", config, metrics, None, out, table)


# -- mpipe-memory -------------------------------------------------------------------------------


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


# -- mpipe-strategy -----------------------------------------------------------------------------


def strategy_row(spec: Layer, rate: float) -> tuple[Row, float]:
    """A row of the table, and the time of the selected strategy above the best, in percent."""
    tokens, exchange = spec.tokens // 2, LoopbackExchange(DEVICE, rate)
    times = {
        name: statistics.median(timed(spec, tokens, exchange, partitions=4, strategy=name))
        for name in REUSING
    }
    layer = spec.build(exchange, partitions=4)
    step(layer, spec.rows(tokens), spec.rows(tokens))()
    chosen, best = str(layer.strategy), min(times, key=lambda name: times[name])
    above = 100 * (times[chosen] / times[best] - 1)
    row = {
        "layer": f"{spec.name}, {tokens:,} tokens",
        "link, GB/s": rate,
        **{f"{name}, ms": f"{times[name]:.2f}" for name in REUSING},
        "best": best,
        "selected": chosen,
        "above the best": f"{above:.1f}%",
    }
    if layer.speeds is not None:
        print(layer.speeds)
    return row, above


def strategy(out: Path | None) -> None:
    table, above = [], []
    for spec, rate in itertools.product(LAYERS, RATES):
        row, share = strategy_row(spec, rate)
        show(row)
        table.append(row)
        above.append(share)
    good = sum(share <= 5 for share in above)
    config = {
        "row": "selected memory reusing strategy, time above the best measured one",
        "compare": f"within 5% in {good} of {len(above)} settings",
        "partitions": 4,
    }
    write_record("mpipe-strategy", config, {"above": metric(above, "%")}, None, out, table)


# -- pictures -----------------------------------------------------------------------------------


def timeline(out: Path | None) -> None:
    exchange = LoopbackExchange(DEVICE, 50)
    layer = W1.build(exchange, partitions=4, strategy="S3")
    work = step(layer, W1.rows(16384), W1.rows(16384))
    milliseconds(work)
    exchange.recorder.start()
    work()
    torch.cuda.synchronize()
    exchange.recorder.stop()
    title = "MoELayer, 4 partitions, S3: forward and backward of W1's layer, 16,384 tokens, 50 GB/s"
    path = Path(out or ".") / "timeline-moe-layer.png"
    draw_timeline(exchange.recorder.spans(), path, title)
    print(path)


def show(row: Row) -> None:
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


PARTS: dict[str, Callable[[Path | None], None]] = {
    part.__name__: part for part in (overlap, granularity, memory, strategy, timeline)
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS])
    parser.add_argument("--out", type=Path, default=None, help="folder for records and pictures")
    args = parser.parse_args(arguments)
    for name in args.parts:
        PARTS[name](args.out)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
