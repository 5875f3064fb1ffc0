"""Tokens per second by number of experts: one GPU capped at 40 GiB, host memory, SSD.

PYTHONPATH=src python3 bench/scale.py --preset moe-l --experts 8,16,24,32 --disk FOLDER
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from record import RESULTS, Metric, metric, write_record
from workload import SEQ, Run, Work, build, measure, optimize, show

from overspill.core.errors import OverspillError
from overspill.core.sizes import format_size
from overspill.models.presets import get_preset


def run_once(
    preset: str, experts: int, args: argparse.Namespace, state_dtype: torch.dtype, **budgets: object
) -> tuple[Run, str]:
    config = get_preset(preset, n_experts=experts)
    model = build(config, state_dtype=state_dtype, keep_gradients=False, **budgets)
    engine = model.overspill
    try:
        optimizer = optimize(model, state_dtype=state_dtype)
        on_disk = engine.placement.mode == "disk"
        # experts move to the GPU in the first steps
        warm, count, traced = (1, 1, 0) if on_disk else (8, args.steps, 1)
        run = measure(model, optimizer, Work(args.batch), warm, count, traced=traced)
        return run, engine.describe()
    finally:
        engine.close()


def run_in_process(*args: object, **budgets: object) -> tuple[Run, str]:
    """`run_once` in a new process, so that all memory is free at the start of each run."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run_once, *args, **budgets).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="moe-l")
    parser.add_argument("--experts", default="8,16,24,32")
    parser.add_argument("--gpu-memory", default="40GiB")
    parser.add_argument("--whole-gpu", default="130GiB", help="budget of the runs without offload")
    parser.add_argument("--bf16-states", default="32", help="numbers of experts with bf16 moments")
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="keep the other rows of the record")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    narrow = {int(text) for text in args.bf16_states.split(",") if text}
    name = f"scale-{args.preset}"
    file = (args.out or RESULTS) / f"{name}.json"
    old = json.loads(file.read_text()) if args.add and file.exists() else {}
    table = old.get("table", [])
    speeds = [Metric(**old["metrics"]["tokens_per_second"])] if old else []
    for experts in (int(text) for text in args.experts.split(",")):
        config = get_preset(args.preset, n_experts=experts)
        dtype = torch.bfloat16 if experts in narrow else torch.float32
        row = {
            "experts": experts,
            "parameters": f"{config.total_params / 1e9:.2f} B",
            "moments": "bf16" if experts in narrow else "fp32",
        }
        try:
            budgets = {"gpu_memory": args.gpu_memory, "disk": args.disk}
            run, where = run_in_process(args.preset, experts, args, dtype, **budgets)
            show(f"{args.preset} {experts}", run)
            speed = metric(run.speed, "tokens/s")
            speeds.append(speed)
            row |= {
                "tokens/s": f"{speed.median:,.0f}",
                "GPU memory": format_size(run.gpu_bytes),
                "host memory": format_size(run.host_bytes),
                "where": where,
            }
        except OverspillError as error:
            row |= {"tokens/s": "does not fit", "where": str(error)}
        try:
            whole = {"gpu_memory": args.whole_gpu, "mode": "gpu"}
            run, _ = run_in_process(args.preset, experts, args, dtype, **whole)
            show(f"{args.preset} {experts} on the GPU", run)
            row["tokens/s, all on GPU"] = f"{metric(run.speed, 'tokens/s').median:,.0f}"
        except (OverspillError, torch.cuda.OutOfMemoryError):
            row["tokens/s, all on GPU"] = "does not fit"
        table = sorted([*(r for r in table if r["experts"] != experts), row], key=_experts)
        details: dict[str, object] = {
            "row": f"{args.preset} by number of experts",
            "batch": f"{args.batch}×{SEQ}",
        }
        if old:
            details["earlier rows"] = {key: old[key] for key in ("command", "commit", "date")}
        metrics = {"tokens_per_second": speeds[0]} if speeds else {}
        if metrics:  # written after each run, so that an interrupted benchmark keeps its results
            write_record(name, details, metrics, None, args.out, table)


def _experts(row: dict[str, object]) -> int:
    return int(str(row["experts"]))


if __name__ == "__main__":
    main()
