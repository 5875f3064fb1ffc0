"""Tokens a second of Qwen3-30B-A3B at full size over GPU memory, with experts in bf16 and in 4
bits: one request, random weights, made without a checkpoint.

PYTHONPATH=src python3 bench/quantized_memory.py --routing gptoss20b_decode_experts_only.npz
python3 bench/quantized_memory.py --plot-only     # the picture of the record; needs no GPU
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record import RESULTS, ROOT, Metric, metric, write_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "quantized-memory"
BUDGETS = (12, 16, 24, 40, 64)
"""GiB of GPU memory, in rising order: memory is not given back."""
COLOURS = {"bf16": "#c8702a", "mxfp4": "#2f6db3"}
WORDS = {"bf16": "bf16: 54 GiB of experts", "mxfp4": "MXFP4: 14 GiB of experts"}
_FILLED = 0.75
"""Share of a budget: models that need no more are on the GPU as a whole, as in `overspill.load`."""


def measure(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """A row for each budget. The model is made once."""
    from serve_packed import Bench, release_memory

    import overspill

    bench = Bench(args)
    settings = overspill.Settings(residency=False)
    given = {} if args.smoke else {"gpu_memory": f"{args.budgets[0]}GiB", "mode": "host"}
    with bench.model(48, name, settings=settings, **given) as model:
        engine = model.overspill
        dense = sum(p.nbytes for p in model.parameters())
        needed = dense + engine.n_layers * engine.n_experts * engine.layout.weight_bytes
        for gib in args.budgets:
            release_memory()  # of the LLM before: reserved memory counts
            engine.memory.limit(gib << 30)
            fits = needed <= _FILLED * (gib << 30)
            if fits:
                engine.set_residents([engine.n_experts] * engine.n_layers)
            with (
                overspill.LLM(model, context=512, max_batch=1) as llm,
                _routing(model, args.routing),
            ):
                bench.decode(llm, 1)  # the cache learns
                speeds, missing = bench.decode(llm, 1)
                slots = llm.stats().get("expert_slots", 0)
            del llm  # its slots are freed before the next one counts free memory
            uses = engine.n_layers * model.config.num_experts_per_tok
            on_gpu = engine.n_layers * engine.n_experts if fits else slots
            yield {
                "experts": name,
                "GPU memory": gib,
                "tokens/s": round(statistics.median(speeds), 1),
                "low": round(min(speeds), 1),
                "high": round(max(speeds), 1),
                "experts on the GPU": on_gpu,
                "hit rate": f"{1 - missing / uses:.0%}",
            }


def _routing(model: Any, path: Path | None) -> AbstractContextManager[None]:
    if path is None:
        return nullcontext()
    from packed_models import wide_routing

    from overspill.simulate import routed_by

    engine, top_k = model.overspill, model.config.num_experts_per_tok
    return routed_by(model, wide_routing(path, engine.n_layers, engine.n_experts, top_k))


def write(table: list[dict[str, Any]], args: argparse.Namespace) -> None:
    metrics: dict[str, Metric] = {}
    for row in reversed(table):
        speeds = [row[key] for key in ("low", "tokens/s", "high")]
        metrics[f"{row['experts']}_{row['GPU memory']}gib"] = metric(speeds, "tokens/s")
    details: dict[str, Any] = {
        "row": "Qwen3-30B-A3B at full size, one request, by GiB of GPU memory",
        "picture": f"{NAME}.png",
        "tokens": args.tokens,
        "routing": "that of random weights",
    }
    if args.routing is not None:
        from packed_models import WIDE_ROUTING

        details["routing"] = WIDE_ROUTING
    write_record(NAME, details, metrics, None, args.out, table)


def draw_picture(results: Path, out: Path) -> bool:
    """Draws the picture; no-op without a record."""
    from pregate_plot import Plot, draw  # imports matplotlib, which measuring does not need

    title = "Qwen3-30B-A3B at full size, one request: speed by GPU memory"
    return draw(Plot(NAME, (NAME,), _draw_lines, title), results, out)


def _draw_lines(axes: "Sequence[Axes]", tables: list[list[dict[str, Any]]]) -> None:
    (only,), (table,) = axes, tables
    budgets = sorted({row["GPU memory"] for row in table})
    for name, colour in COLOURS.items():
        own = [row for row in table if row["experts"] == name]
        if own:
            x, y = zip(*((row["GPU memory"], row["tokens/s"]) for row in own), strict=True)
            only.plot(x, y, marker="o", linewidth=1.8, color=colour, label=WORDS[name])
            for row in own:
                only.annotate(
                    f"{row['tokens/s']:.0f}", (row["GPU memory"], row["tokens/s"]),
                    xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9,
                    color=colour,
                )  # fmt: skip
    only.set_xticks(budgets, [f"{gib}" for gib in budgets])
    only.set_ylim(bottom=0)
    only.margins(y=0.1)
    only.set_xlabel("GiB of GPU memory")
    only.set_ylabel("tokens a second")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=list(COLOURS), default=list(COLOURS))
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS), help="GiB")
    parser.add_argument("--routing", type=Path, help="recorded routing of gpt-oss")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; needs --out")
    parser.add_argument("--plot-only", action="store_true", help="draw the record, into docs/")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the drawn record")
    parser.add_argument("--out", type=Path, help="folder of the record, or of the picture")
    args = parser.parse_args(arguments)
    if args.smoke and args.out is None:
        parser.error("--smoke needs --out FOLDER: its record is not for bench/results")
    if args.plot_only:
        found = draw_picture(args.results, args.out or ROOT / "docs")
        print(f"{NAME}: {'drawn' if found else 'no record'}")
        return
    args.budgets.sort()
    table: list[dict[str, Any]] = []
    for name in args.formats:
        for row in measure(args, name):
            table.append(row)
            print(row, flush=True)
        write(table, args)  # after each format: the next one may not end in time


if __name__ == "__main__":
    main()
