"""Training steps of a GPT-MoE larger than GPU memory: tokens per second, memory, and a timeline.

PYTHONPATH=src python3 bench/train.py --preset w1 --gpu-memory 12GiB --batches 16,64 --clip both
"""

import argparse
from pathlib import Path

from record import Limit, metric, write_record
from workload import SEQ, Run, Work, build, measure, optimize, show

from overspill.models.config import GPTConfig
from overspill.models.presets import get_preset
from overspill.moe.settings import Settings

# measured limits of the reference machine (docs/benchmarks.md)
ADAM_RATE, PCIE, MATRIX = 5.36e9, 55e9, 786e12


def limit(config: GPTConfig, tokens: int, offloaded: bool) -> Limit:
    """The slowest resource if all others were unlimited."""
    experts = config.expert_params
    active = config.total_params - experts + experts * config.top_k // config.n_experts
    times = {"GPU, 8 operations per parameter and token": 8 * active * tokens / MATRIX}
    if offloaded:
        times["CPU AdamW alone at 5.36 Gparam/s"] = experts / ADAM_RATE
        times["PCIe, every expert uploaded twice"] = experts * 4 / PCIE
    source, seconds = max(times.items(), key=lambda item: item[1])
    return Limit(tokens / seconds, "tokens/s", source)


def save(name: str, config: GPTConfig, run: Run, offloaded: bool, args: argparse.Namespace) -> None:
    batch = run.tokens // SEQ
    metrics = {
        "tokens_per_second": metric(run.speed, "tokens/s"),
        "step": metric(run.seconds, "s"),
        "gpu_memory": metric([run.gpu_bytes / 2**30], "GiB"),
        "host_memory": metric([run.host_bytes / config.expert_params], "B/param"),
    }
    for lane, share in run.busy.items():
        metrics[f"busy_{lane.replace(' ', '_')}"] = metric([share], "share")
    row = f"{args.preset}, {batch}×{SEQ} tokens per step"
    if name.endswith("clip"):
        row += ", exact clipping"
    if not offloaded:
        row += ", everything on the GPU"
    details = {
        "row": row,
        "show": ["gpu_memory", "host_memory"],
        "gpu_memory": args.gpu_memory,
        "expert_parameters": config.expert_params,
        "parameters": config.total_params,
        "dtype": "bf16 weights, fp32 master and moments",
        "warm": args.warm,
        "steps": args.steps,
    }
    write_record(name, details, metrics, limit(config, run.tokens, offloaded), args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="w1")
    parser.add_argument("--gpu-memory", default="12GiB")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--batches", default="16,64", help="sequences of 1024 tokens per step")
    parser.add_argument("--clip", default="no", choices=("no", "yes", "both"))
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--timeline", type=Path, default=None, help="folder for timelines")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = get_preset(args.preset)
    settings = Settings(threads=args.threads)
    model = build(config, settings, gpu_memory=args.gpu_memory, mode=args.mode)
    engine = model.overspill
    offloaded = engine.placement.mode != "gpu"
    for norm in {"no": [None], "yes": [1.0], "both": [None, 1.0]}[args.clip]:
        optimizer = None  # an engine has one optimizer at a time
        optimizer = optimize(model, norm)
        for batch in (int(text) for text in args.batches.split(",")):
            middle = "" if offloaded else "gpu-only-"
            name = f"train-{args.preset}-{middle}{batch}x{SEQ}{'' if norm is None else '-clip'}"
            timeline = None if args.timeline is None else args.timeline / name
            run = measure(model, optimizer, Work(batch), args.warm, args.steps, timeline)
            show(name, run)
            save(name, config, run, offloaded, args)
    engine.close()


if __name__ == "__main__":
    main()
