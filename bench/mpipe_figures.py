"""Figures 8 to 13 of MPipeMoE as far as one GPU allows. The link of the paper's cluster is 25 GB/s
for each GPU; numbers of GPUs are not emulated."""

import itertools
from collections.abc import Sequence

from mpipe_granularity import RATE, measure_all
from mpipe_layers import GPT_XL, NUMBERS, PAPER, RATES, Row, Setup, show
from mpipe_memory import peak, saving
from mpipe_methods import FAST, FASTER, MPIPE, PIPE, PIPE_1, PIPE_4, Comparison
from mpipe_strategy import REUSING, measured_speeds, selection, strategy_times
from record import Metric, metric, write_record

BATCHES = (4096, 16384, 65536)
_MIB = 2**20


def _write(
    setup: Setup, number: int, row: str, metrics: dict[str, Metric], table: Sequence[Row]
) -> None:
    name = f"mpipe-figure-{number}"
    config = {"row": f"Figure {number}: {row}", "picture": f"{name}.png"}
    write_record(name, config, metrics, None, setup.out, table)


def _comparisons(setup: Setup) -> list[Comparison]:
    return [
        Comparison(setup, setup.layer(spec), setup.batch(tokens), RATE)
        for spec, tokens in itertools.product(setup.few(PAPER, 1), setup.few(BATCHES))
    ]


def _speedups(table: Sequence[Row], over: Sequence[str]) -> dict[str, Metric]:
    keys = {name: f"over {name}" for name in over}
    return {key: metric([row[key] for row in table], "×") for key in keys.values()}


def figure_8(setup: Setup) -> None:
    """Speedups of PipeMoE, without memory reuse."""
    table: list[Row] = []
    others = FAST, FASTER, PIPE_1
    for one in _comparisons(setup):
        chosen = [one.choose(method) for method in (*others, PIPE)]
        ms = one.milliseconds(chosen)
        table.append(
            {
                "layer": one.spec.name,
                "tokens": one.tokens,
                **{f"{name}, ms": round(ms[name], 3) for name in ms},
                "n": chosen[-1].partitions,
                **{f"over {name}": round(ms[name] / ms[PIPE], 3) for name in others},
            }
        )
        show(table[-1])
    row = f"speedup of PipeMoE (adaptive n, no memory reuse) at {RATE} GB/s"
    _write(setup, 8, row, _speedups(table, others), table)


def figure_9(setup: Setup) -> None:
    """Memory as a share of FastMoE's, and speedups of MPipeMoE."""
    table: list[Row] = []
    others = FAST, FASTER
    for one in _comparisons(setup):
        chosen = [one.choose(method) for method in (*others, MPIPE)]
        ms, peaks = one.milliseconds(chosen), one.peaks(chosen)
        table.append(
            {
                "layer": one.spec.name,
                "tokens": one.tokens,
                **{f"{name}, MiB": round(peaks[name] / _MIB, 3) for name in peaks},
                "MPipeMoE is": f"n = {chosen[-1].partitions}, {chosen[-1].strategy}",
                **{f"memory of {name}": round(peaks[name] / peaks[FAST], 3) for name in peaks},
                **{f"over {name}": round(ms[name] / ms[MPIPE], 3) for name in others},
            }
        )
        show(table[-1])
    saved = [100 * (1 - row[f"memory of {MPIPE}"]) for row in table]
    metrics = {f"saved, of {FAST}": metric(saved, "%"), **_speedups(table, others)}
    _write(setup, 9, f"memory and speed of MPipeMoE at {RATE} GB/s", metrics, table)


def figure_10(setup: Setup) -> None:
    """The saved share of memory and its bound."""
    table: list[Row] = []
    for spec, batch in itertools.product(setup.few(PAPER, 1), setup.few(BATCHES)):
        spec, tokens = setup.layer(spec), setup.batch(batch)
        unshared = peak(setup, spec, tokens, 1, "none")
        for n in NUMBERS[1:]:
            kept, reused = (peak(setup, spec, tokens, n, name) for name in ("none", "S3"))
            found = saving(spec, tokens, n, (unshared, kept, reused))
            table.append(
                {
                    "layer": spec.name,
                    "tokens": tokens,
                    "n": n,
                    "saved, %": round(100 * found.ratio, 2),
                    "equation 6, %": round(100 * found.ratio_bound, 2),
                    "of the bound, %": round(100 * found.of_equation_6, 2),
                }
            )
            show(table[-1])
    metrics = {"of the bound": metric([row["of the bound, %"] for row in table], "%")}
    _write(setup, 10, "memory saved by reuse (S3) and the bound of equation 6", metrics, table)


def figure_11(setup: Setup) -> None:
    """Memory and time of all methods."""
    spec = setup.layer(GPT_XL)
    one = Comparison(setup, spec, spec.tokens, RATE)
    chosen = [one.choose(method) for method in (FAST, FASTER, PIPE_4, PIPE, MPIPE)]
    ms, peaks = one.milliseconds(chosen), one.peaks(chosen)
    table: list[Row] = [
        {
            "method": each.method,
            "n": None if each.method in (FAST, FASTER) else each.partitions,
            "strategy": each.strategy,
            "MiB": round(peaks[each.method] / _MIB, 3),
            "ms": round(ms[each.method], 3),
        }
        for each in chosen
    ]
    for row in table:
        show(row)
    metrics = {f"MPipeMoE over {name}": metric([ms[name] / ms[MPIPE]], "×") for name in ms}
    text = f"memory and time of GPT-XL's layer, {one.tokens:,} tokens, {RATE} GB/s"
    _write(setup, 11, text, metrics, table)


def figure_12(setup: Setup) -> None:
    """The number of partitions and the batch size."""
    table: list[Row] = []
    sizes = (2048, 4096, 8192, 12288, 16384, 24576, 32768, 49152, 65536)
    for found in measure_all(setup, setup.layer(GPT_XL), setup.few(sizes)):
        (adaptive,) = found.searches
        table.append(
            {
                "tokens": found.tokens,
                **{f"n = {n}, ms": round(found.fixed[n], 3) for n in NUMBERS},
                "adaptive, ms": round(adaptive.after, 3),
                "adaptive n": adaptive.chosen,
                "above the best, %": round(found.above(adaptive), 2),
            }
        )
        show(table[-1])
    metrics = {"above the best": metric([row["above the best, %"] for row in table], "%")}
    text = f"partitions of GPT-XL's layer by batch size at {RATE} GB/s"
    _write(setup, 12, text, metrics, table)


def figure_13(setup: Setup) -> None:
    """The strategies; slower links stand for more GPUs, whose exchange is slower."""
    spec, table = setup.layer(GPT_XL), list[Row]()
    for rate, batch in itertools.product(setup.few(RATES), (16384, 32768)):
        tokens = setup.batch(batch)
        ms = strategy_times(setup, spec, tokens, rate)
        columns, above = selection(spec, measured_speeds(setup, spec, tokens, rate), ms)
        table.append(
            {
                "link, GB/s": rate,
                "tokens": tokens,
                **{f"{name}, ms": round(ms[name], 3) for name in ("none", *REUSING)},
                "best": columns["best"],
                "MPipeMoE": columns["selected"].split(",")[0],
                "above the best, %": round(above[0], 2),
            }
        )
        show(table[-1])
    metrics = {"above the best": metric([row["above the best, %"] for row in table], "%")}
    text = "strategies of GPT-XL's layer by link and batch size, 4 partitions"
    _write(setup, 13, text, metrics, table)


FIGURES = (figure_8, figure_9, figure_10, figure_11, figure_12, figure_13)
