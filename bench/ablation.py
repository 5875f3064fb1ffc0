"""The gain of each technique: one switch off at a time (es-moe, Table 3).

PYTHONPATH=src python3 bench/ablation.py --preset moe-l --experts 16
"""

import argparse
from dataclasses import replace
from pathlib import Path

from record import metric, write_record
from workload import SEQ, Work, build, measure, optimize, show

from overspill.models.presets import get_preset
from overspill.moe.settings import Settings

ALL_ON = Settings()
SWITCHES = {
    "all on": ALL_ON,
    "without optimizer overlap": replace(ALL_ON, overlap_updates=False),
    "without upload overlap": replace(ALL_ON, overlap_uploads=False),
    "without waves": replace(ALL_ON, waves=False),
    "without micro-batch grouping": ALL_ON,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="moe-l")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--gpu-memory", default="40GiB")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = get_preset(args.preset, n_experts=args.experts)
    model = build(config, ALL_ON, gpu_memory=args.gpu_memory)
    engine = model.overspill
    optimizer = optimize(model)
    table, whole = [], None
    for name, settings in SWITCHES.items():
        engine.switch(settings)
        work = Work(args.batch, args.micro, grouped=name != "without micro-batch grouping")
        run = measure(model, optimizer, work, args.warm, args.steps, traced=1)
        show(name, run)
        speed = metric(run.speed, "tokens/s")
        whole = whole or speed
        share = speed.median / whole.median - 1
        table.append(
            {
                "scheme": name,
                "tokens/s": f"{speed.median:,.0f} ({speed.low:,.0f}–{speed.high:,.0f})",
                "change": "" if speed is whole else f"{share:+.1%}",
                "optimizer busy": f"{run.busy['optimizer']:.0%}",
                "upload busy": f"{run.busy['upload']:.0%}",
                "GPU busy": f"{run.busy['compute']:.0%}",
            }
        )
    engine.close()
    assert whole is not None
    details = {
        "row": f"{args.preset} {args.experts} experts, one switch off at a time",
        "batch": f"{args.batch}×{SEQ} in {args.micro} micro-batches",
        "gpu_memory": args.gpu_memory,
    }
    metrics = {"tokens_per_second": whole}
    name = f"ablation-{args.preset}-{args.experts}"
    write_record(name, details, metrics, None, args.out, table)


if __name__ == "__main__":
    main()
