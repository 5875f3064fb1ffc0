"""Training steps of a GPT-MoE beyond GPU memory: tokens a second, memory, and a timeline.

PYTHONPATH=src python3 bench/train.py --preset w1 --gpu-memory 12GiB --batches 16,64 --clip both
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from record import Limit, Metric, metric, write_record
from workload import SEQ, Run, Work, build, measure, optimize, show

from overspill.models.config import GPTConfig
from overspill.models.presets import get_preset
from overspill.moe.settings import Settings

# The reference machine's measured ceilings (docs/benchmarks.md).
ADAM_RATE, PCIE, MATRIX = 5.36e9, 55e9, 786e12


def record_name(batch: int, offloaded: bool, clip: bool, preset: str = "w1") -> str:
    middle = "" if offloaded else "gpu-only-"
    return f"train-{preset}-{middle}{batch}x{SEQ}{'-clip' if clip else ''}"


def limit(config: GPTConfig, tokens: int, streamed: int) -> Limit:
    """The slowest resource if everything else were free; `streamed` parameters of experts do not
    stay on the GPU."""
    experts = config.expert_params
    active = config.total_params - experts + experts * config.top_k // config.n_experts
    part = "" if streamed == experts else f", {streamed / experts:.0%} of the experts"
    times = {
        "GPU, 8 operations a parameter and token": 8 * active * tokens / MATRIX,
        f"CPU AdamW alone at 5.36 Gparam/s{part}": streamed / ADAM_RATE,
        f"PCIe, every expert up twice{part}": streamed * 4 / PCIE,
    }
    source, seconds = max(times.items(), key=lambda item: item[1])
    return Limit(tokens / seconds, "tokens/s", source)


def row_of(batch: int, offloaded: bool, clip: bool, preset: str = "w1") -> str:
    """The workload in words, for tables and pictures."""
    row = f"{preset}, {batch}×{SEQ} tokens a step"
    if clip:
        row += ", exact clipping"
    return row if offloaded else f"{row}, everything on the GPU"


def metrics_of(config: GPTConfig, runs: Sequence[Run]) -> dict[str, Metric]:
    """The metrics of a workload that was measured several times in one process."""
    # the lowest: the peak of a process includes earlier measurements
    host_bytes = min(run.host_bytes for run in runs)
    metrics = {
        "tokens_per_second": metric([speed for run in runs for speed in run.speed], "tokens/s"),
        "step": metric([seconds for run in runs for seconds in run.seconds], "s"),
        "gpu_memory": metric([run.gpu_bytes / 2**30 for run in runs], "GiB"),
        "host_memory": metric([host_bytes / config.expert_params], "B/param"),
    }
    for row in dict.fromkeys(row for run in runs for row in run.busy):
        shares = [run.busy.get(row, 0.0) for run in runs]
        metrics[f"busy_{row.replace(' ', '_')}"] = metric(shares, "share")
    return metrics


def save(
    config: GPTConfig,
    run: Run,
    offloaded: bool,
    clip: bool,
    given: Mapping[str, Any],
    out: Path,
    name: str | None = None,
) -> None:
    """Writes the record of a run; `given` are the arguments it was made with."""
    batch = run.tokens // SEQ
    name = name or record_name(batch, offloaded, clip, str(given["preset"]))
    details = {
        "row": row_of(batch, offloaded, clip, str(given["preset"])),
        "show": ["gpu_memory", "host_memory"],
        **given,
        "expert_parameters": config.expert_params,
        "parameters": config.total_params,
        "dtype": "bf16 weights, fp32 master and moments",
    }
    metrics = metrics_of(config, [run])
    metrics["experts_on_gpu"] = metric([100 * run.on_gpu], "%")
    bound = limit(config, run.tokens, round((1 - run.on_gpu) * config.expert_params))
    write_record(name, details, metrics, bound, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="w1")
    parser.add_argument("--gpu-memory", default="12GiB")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--batches", default="16,64", help="sequences of 1024 tokens a step")
    parser.add_argument("--clip", default="no", choices=("no", "yes", "both"))
    parser.add_argument("--warm", type=int, default=8, help="experts move in the first few steps")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--residency",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use all GPU memory for experts",
    )
    parser.add_argument("--timeline", type=Path, default=None, help="folder for timelines")
    parser.add_argument("--name", default=None, help="of the only record and timeline")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = get_preset(args.preset)
    given = {key: getattr(args, key) for key in ("preset", "gpu_memory", "warm", "steps")}
    settings = Settings(threads=args.threads, residency=args.residency)
    model = build(config, settings, gpu_memory=args.gpu_memory, mode=args.mode)
    engine = model.overspill
    offloaded = engine.placement.mode != "gpu"
    norms = {"no": [None], "yes": [1.0], "both": [None, 1.0]}[args.clip]
    batches = sorted(int(text) for text in args.batches.split(","))
    for batch, norm in itertools.product(batches, norms):  # a large batch leaves less to experts
        optimizer = None  # an engine has one optimizer at a time
        optimizer = optimize(model, norm)
        clip = norm is not None
        name = args.name or record_name(batch, offloaded, clip, args.preset)
        title = row_of(batch, offloaded, clip, args.preset.upper())
        title += f", {args.gpu_memory} of GPU memory" if offloaded else ""
        timeline = None if args.timeline is None else args.timeline / name
        work = Work(batch)
        run = measure(model, optimizer, work, args.warm, args.steps, timeline, title=title)
        show(name, run)
        described = {**given, "placement": engine.describe()}
        save(config, run, offloaded, clip, described, args.out, name)
    engine.close()


if __name__ == "__main__":
    main()
