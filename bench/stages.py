"""Training in pipeline stages on one GPU, next to the same without stages and to GPipe.

PYTHONPATH=src python3 bench/stages.py                      # record stages-w1
PYTHONPATH=src python3 bench/stages.py --layers 6 --peers   # record stages-w1-6, GPipe too
PYTHONPATH=src python3 bench/stages.py --smoke              # tiny, on the CPU, no record
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpipe import GPipe
from hf_train import mixtral, w1
from record import Limit, metric, write_record
from train import PCIE
from transformers import MixtralForCausalLM

import overspill
from overspill.core.layer_map import StagePart
from overspill.models.stages.division import divide_model


def batches(config: Any, args: Any, step: int) -> list[dict[str, Any]]:
    generator = torch.Generator(device=args.device).manual_seed(step)
    shape = (args.micro_batches * args.batch, args.seq)
    tokens = torch.randint(config.vocab_size, shape, device=args.device, generator=generator)
    return [
        {"input_ids": part, "labels": part, "use_cache": False}
        for part in tokens.chunk(args.micro_batches)
    ]


def timed(step: Callable[[int], float], args: Any) -> tuple[list[float], list[float]]:
    """Seconds of each step after the first ones, and all losses."""
    seconds, losses = [], []
    for number in range(args.warm + args.steps):
        began = time.perf_counter()
        losses.append(step(number))
        if args.device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        print(f"step {number}: {took:.2f} s, loss {losses[-1]:.4f}", file=sys.stderr)
        if number >= args.warm:
            seconds.append(took)
    return seconds, losses


def ours(config: Any, args: Any, n_stages: int | None) -> dict[str, Any]:
    """Our training with accumulation, in stages or without."""
    torch.manual_seed(0)
    where = {"slots": args.slots} if args.slots else {"gpu_memory": args.gpu_memory}
    model = overspill.from_config(
        config, dtype=args.dtype, quiet=True, keep_gradients=True, device=args.device,
        stages=n_stages, progress=False, **where,
    )  # fmt: skip
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = model.overspill
    optimizer = overspill.AdamW(model, lr=1e-4, max_grad_norm=args.clip)
    stages = None if n_stages is None else overspill.Stages(model)
    uploaded: list[float] = []

    def step(number: int) -> float:
        before = engine.recorder.counters().get("upload", 0)
        micro_batches, losses = batches(config, args, number), []
        if stages is not None:

            def loss_of(_: int, output: Any) -> Any:
                losses.append(output.loss.detach())
                return output.loss / args.micro_batches

            stages.backward(micro_batches, optimizer, loss_of)
        else:
            for place, batch in enumerate(micro_batches, start=1):
                if place < args.micro_batches:
                    with optimizer.accumulate():
                        loss = model(**batch).loss
                        (loss / args.micro_batches).backward()
                else:
                    loss = model(**batch).loss
                    (loss / args.micro_batches).backward()
                losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        value = float(torch.stack(losses).mean())
        uploaded.append(engine.recorder.counters().get("upload", 0) - before)
        return value

    seconds, losses = timed(step, args)
    streamed = engine.n_layers * engine.n_experts - sum(engine.homes)
    found = {
        "seconds": seconds,
        "losses": losses,
        "uploads_per_expert": [
            size / engine.layout.weight_bytes / max(1, streamed) for size in uploaded[args.warm :]
        ],
        "upload_bytes": uploaded[args.warm :],
        "on_gpu": sum(engine.homes),
        "gpu_bytes": torch.cuda.max_memory_reserved() if args.device == "cuda" else 0,
        "placement": engine.describe(),
    }
    engine.close()
    return found


def gpipe(config: Any, args: Any, offload: bool, parts: list[StagePart]) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("cpu" if offload else args.device):
        model = MixtralForCausalLM(config).to(args.dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    pipe = GPipe(model, [part.blocks for part in parts], torch.device(args.device), offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(number: int) -> float:
        loss = pipe.backward(batches(config, args, number))
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    seconds, losses = timed(step, args)
    return {"seconds": seconds, "losses": losses}


def divided(config: Any, n_stages: int, dtype: torch.dtype) -> list[StagePart]:
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    size = 3 * config.hidden_size * config.intermediate_size
    return divide_model(model, n_stages, config.num_local_experts, size, dtype.itemsize)


def clear(args: Any) -> None:
    gc.collect()
    if args.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(config: Any, args: Any) -> dict[str, dict[str, Any]]:
    found = {}
    found["without stages"] = ours(config, args, None)
    clear(args)
    found[f"{args.stages} stages"] = ours(config, args, args.stages)
    clear(args)
    if args.peers:
        parts = divided(config, args.stages, args.dtype)
        for name, offload in (("GPipe on the GPU", False), ("GPipe, naive offload", True)):
            found[name] = gpipe(config, args, offload, parts)
            clear(args)
    return found


def save(found: dict[str, dict[str, Any]], config: Any, args: Any) -> None:
    tokens = args.batch * args.micro_batches * args.seq
    rows = []
    for name, run in found.items():
        speed = metric([tokens / seconds for seconds in run["seconds"]], "tokens/s")
        row = {"training": name, "tokens/s": f"{speed.median:,.0f}"}
        if "uploads_per_expert" in run:
            uploads = metric(run["uploads_per_expert"], "uploads")
            row["uploads of a streamed expert"] = f"{uploads.median:.2f}"
            row["experts on the GPU"] = f"{run['on_gpu']:,}"
            row["GPU memory, GiB"] = f"{run['gpu_bytes'] / 2**30:.1f}"
        row["loss"] = f"{run['losses'][-1]:.4f}"
        rows.append(row)
        print(row, flush=True)
    staged, plain = found[f"{args.stages} stages"], found["without stages"]
    speed = [tokens / seconds for seconds in staged["seconds"]]
    upload = max(staged["upload_bytes"]) / PCIE
    limit = Limit(tokens / upload, "tokens/s", "PCIe, what was uploaded") if upload else None
    metrics = {
        "tokens_per_second": metric(speed, "tokens/s"),
        "without_stages": metric([tokens / s for s in plain["seconds"]], "tokens/s"),
        "uploads_per_expert": metric(staged["uploads_per_expert"], "uploads"),
    }
    cut = "" if args.layers is None else f" with {args.layers} layers"
    details = {
        "row": f"W1 as Mixtral{cut}, {args.micro_batches} micro-batches of {args.batch}×{args.seq} "
        f"tokens, {args.stages} stages, {args.gpu_memory}",
        "placement": staged["placement"],
        "losses": {name: run["losses"] for name, run in found.items()},
    }
    name = "stages-w1" if args.layers is None else f"stages-w1-{args.layers}"
    write_record(name, details, metrics, limit, args.out, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--gpu-memory", default="12GiB")
    parser.add_argument("--slots", type=int, default=None)
    parser.add_argument("--layers", type=int, default=None, help="W1 with fewer layers")
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--warm", type=int, default=6, help="experts move in the first few steps")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--peers", action="store_true", help="GPipe too")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, no record")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.device, args.dtype, config = "cuda", torch.bfloat16, w1()
    if args.layers is not None:
        config.num_hidden_layers = args.layers
    if args.smoke:
        args.device, args.dtype, args.seq, args.slots = "cpu", torch.float32, 16, 12
        args.stages, args.micro_batches, args.warm, args.steps, args.peers = 4, 3, 1, 1, True
        config = mixtral(
            4, hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=4,
            num_local_experts=4,
        )  # fmt: skip
        config.vocab_size = 64
    found = measure(config, args)
    if not args.smoke:
        save(found, config, args)
        return
    for name, run in found.items():
        print(name, [f"{loss:.4f}" for loss in run["losses"]], run.get("uploads_per_expert", ""))


if __name__ == "__main__":
    main()
