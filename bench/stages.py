"""Training in pipeline stages on one GPU, next to the same without stages and to baselines.

PYTHONPATH=src python3 bench/stages.py                      # record stages-w1
PYTHONPATH=src python3 bench/stages.py --layers 6 --peers   # record stages-w1-6, baselines too
PYTHONPATH=src python3 bench/stages.py --model aptmoe-s-16 --layers 16 --peers
PYTHONPATH=src python3 bench/stages.py --stages 8,12,24 --timeline timelines
PYTHONPATH=src python3 bench/stages.py --smoke              # tiny, on the CPU, no record
"""

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
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
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.presets import get_preset
from overspill.models.stages.division import divide_model
from overspill.trace.perfetto import write_perfetto
from overspill.trace.picture import draw_timeline


def batches(config: Any, args: Any, step: int) -> list[dict[str, Any]]:
    generator = torch.Generator(device=args.device).manual_seed(step)
    shape = (args.micro_batches * args.batch, args.seq)
    vocab = config.vocab if isinstance(config, GPTConfig) else config.vocab_size
    tokens = torch.randint(vocab, shape, device=args.device, generator=generator)
    parts = tokens.chunk(args.micro_batches)
    if isinstance(config, GPTConfig):  # its targets are the next tokens
        return [{"tokens": part, "targets": part.roll(-1, 1)} for part in parts]
    return [{"input_ids": part, "labels": part, "use_cache": False} for part in parts]


def offloaded(config: Any, args: Any, n_stages: int | None) -> Any:
    """Our model."""
    torch.manual_seed(0)
    where = {"slots": args.slots} if args.slots else {"gpu_memory": args.gpu_memory}
    given = {"quiet": True, "keep_gradients": True, "device": args.device, "stages": n_stages,
             "progress": False, **where}  # fmt: skip
    if isinstance(config, GPTConfig):
        model = GPTMoE(config, meta_experts=True, device=args.device, dtype=args.dtype)
        return overspill.offload(model, **given)
    model = overspill.from_config(config, dtype=args.dtype, **given)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def plain(config: Any, args: Any) -> Any:
    """The model of the baselines, made on the device, which is faster."""
    torch.manual_seed(0)
    if isinstance(config, GPTConfig):
        return GPTMoE(config, device=args.device, dtype=args.dtype)
    with torch.device(args.device):
        model = MixtralForCausalLM(config).to(args.dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


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


def ours(config: Any, args: Any, n_stages: int | None, name: str) -> dict[str, Any]:
    """Our training with accumulation, in stages or without."""
    model = offloaded(config, args, n_stages)
    engine, recorder = model.overspill, model.overspill.recorder
    optimizer = overspill.AdamW(model, lr=1e-4, max_grad_norm=args.clip)
    stages = None if n_stages is None else overspill.Stages(model)
    copied: dict[str, list[float]] = {"upload": [], "download": []}

    def step(number: int) -> float:
        before = recorder.counters()
        micro_batches, losses = batches(config, args, number), []

        def loss_of(_: int, output: Any) -> Any:
            losses.append(output.loss.detach())
            return output.loss / args.micro_batches

        if stages is not None:
            stages.backward(micro_batches, optimizer, loss_of)
        else:
            for place, batch in enumerate(micro_batches, start=1):
                last = place == args.micro_batches
                with nullcontext() if last else optimizer.accumulate():
                    loss_of(place, model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(torch.stack(losses).mean())
        after = recorder.counters()
        for lane, sizes in copied.items():
            sizes.append(after.get(lane, 0) - before.get(lane, 0))
        return value

    seconds, losses = timed(step, args)
    streamed = max(1, engine.n_layers * engine.n_experts - sum(engine.residents))
    record = streamed * engine.layout.weight_bytes
    found = {
        "seconds": seconds,
        "losses": losses,
        "uploads_per_expert": [size / record for size in copied["upload"][args.warm :]],
        "downloads_per_expert": [size / record for size in copied["download"][args.warm :]],
        "upload_bytes": copied["upload"][args.warm :],
        "on_gpu": sum(engine.residents),
        "sums_on_gpu": engine.memory.share.gradients,
        "gpu_bytes": torch.cuda.max_memory_reserved() if args.device == "cuda" else 0,
        "placement": engine.describe(),
        "busy": traced(step, recorder, args, name),
    }
    engine.close()
    return found


def traced(step: Any, recorder: Any, args: Any, name: str) -> dict[str, float]:
    """Busy shares of the lanes in one more step, and its timeline."""
    recorder.start()
    began = time.perf_counter_ns()
    step(args.warm + args.steps)
    if args.device == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter_ns()
    recorder.stop()
    if args.timeline is not None:
        args.timeline.mkdir(parents=True, exist_ok=True)
        path = args.timeline / name.replace(" ", "-")
        write_perfetto(recorder.spans(), path.with_suffix(".json.gz"))
        draw_timeline(recorder.spans(), path.with_suffix(".png"), name)
    return recorder.busy(began, ended)


def gpipe(
    config: Any, args: Any, parts: list[StagePart], offload: bool, overlap: bool
) -> dict[str, Any]:
    model = plain(config, args)
    blocks = [part.blocks for part in parts]
    pipe = GPipe(model, blocks, torch.device(args.device), offload, overlap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clear(args)
    moved: list[float] = []

    def step(number: int) -> float:
        before = pipe.bytes_moved
        loss = pipe.backward(batches(config, args, number))
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        moved.append(pipe.bytes_moved - before)
        return loss

    seconds, losses = timed(step, args)
    used = torch.cuda.max_memory_reserved() if args.device == "cuda" else 0
    return {"seconds": seconds, "losses": losses, "gpu_bytes": used, "moved_bytes": moved[-1]}


def divided(config: Any, n_stages: int, dtype: torch.dtype) -> list[StagePart]:
    with torch.device("meta"):
        if isinstance(config, GPTConfig):
            model: Any = GPTMoE(config)
            shape = config.n_experts, config.expert_shape.numel
        else:
            model = MixtralForCausalLM(config)
            size = 3 * config.hidden_size * config.intermediate_size
            shape = config.num_local_experts, size
    return divide_model(model, n_stages, *shape, dtype.itemsize)


def clear(args: Any) -> None:
    gc.collect()
    if args.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


PEERS = {
    "GPipe on the GPU": (False, False),
    "GPipe, naive offload": (True, False),
    "as in Mobius": (True, True),
}
"""Whether weights are offloaded, and copied beside compute."""


def measure(config: Any, args: Any) -> dict[str, dict[str, Any]]:
    found = {"without stages": ours(config, args, None, "without stages")}
    clear(args)
    for n_stages in args.stages:
        name = f"{n_stages} stages"
        found[name] = ours(config, args, n_stages, name)
        clear(args)
    if args.peers:
        parts = divided(config, args.stages[0], args.dtype)
        for name, (offload, overlap) in PEERS.items():
            found[name] = gpipe(config, args, parts, offload, overlap)
            clear(args)
    return found


def show(found: dict[str, dict[str, Any]], args: Any) -> list[dict[str, str]]:
    """The rows of the table, printed."""
    tokens, rows = args.batch * args.micro_batches * args.seq, []
    for name, run in found.items():
        speed = metric([tokens / seconds for seconds in run["seconds"]], "tokens/s")
        row = {"training": name, "tokens/s": f"{speed.median:,.0f}"}
        row["GPU memory, GiB"] = f"{run['gpu_bytes'] / 2**30:.1f}"
        if "uploads_per_expert" in run:
            for what in ("uploads", "downloads"):
                each = metric(run[f"{what}_per_expert"], what)
                row[f"{what} of a streamed expert"] = f"{each.median:.2f}"
            row["experts on the GPU"] = f"{run['on_gpu']:,}"
            row["sums on the GPU"] = f"{run['sums_on_gpu']:,}"
            print(name, "busy:", {lane: f"{share:.0%}" for lane, share in run["busy"].items()})
        row["loss"] = f"{run['losses'][-1]:.4f}"
        rows.append(row)
    for row in rows:
        print(row, flush=True)
    return rows


def save(found: dict[str, dict[str, Any]], args: Any) -> None:
    tokens, rows = args.batch * args.micro_batches * args.seq, show(found, args)
    staged, alone = found[f"{args.stages[0]} stages"], found["without stages"]
    speed = [tokens / seconds for seconds in staged["seconds"]]
    upload, before = max(staged["upload_bytes"]) / PCIE, statistics.median(alone["seconds"])
    limit = Limit(before / upload, "×", "PCIe, what was uploaded") if upload else None
    ratios = [before / seconds for seconds in staged["seconds"]]
    metrics = {
        "speedup": metric(ratios, "×"),
        "tokens_per_second": metric(speed, "tokens/s"),
        "without_stages": metric([tokens / s for s in alone["seconds"]], "tokens/s"),
        "uploads_per_expert": metric(staged["uploads_per_expert"], "uploads"),
        "downloads_per_expert": metric(staged["downloads_per_expert"], "downloads"),
    }
    model = "W1 as Mixtral" if args.model == "w1" else args.model
    cut = "" if args.layers is None else f" with {args.layers} layers"
    details = {
        "row": f"{model}{cut}, {args.micro_batches} micro-batches of {args.batch}×{args.seq} "
        f"tokens, {args.stages[0]} stages, {args.gpu_memory}, faster by (without stages)",
        "show": ["tokens_per_second", "without_stages"],
        "placement": staged["placement"],
        "busy": {name: run["busy"] for name, run in found.items() if "busy" in run},
        "losses": {name: run["losses"] for name, run in found.items()},
    }
    name = f"stages-{args.model}" if args.layers is None else f"stages-{args.model}-{args.layers}"
    write_record(args.name or name, details, metrics, limit, args.out, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="w1", help="w1 as Mixtral, or a GPT-MoE preset")
    parser.add_argument("--stages", default="8", help="one or several numbers: 8,12")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--gpu-memory", default="12GiB")
    parser.add_argument("--slots", type=int, default=None)
    parser.add_argument("--layers", type=int, default=None, help="the model with fewer layers")
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--warm", type=int, default=6, help="experts move in the first few steps")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--peers", action="store_true", help="the baselines too")
    parser.add_argument("--timeline", type=Path, default=None, help="folder for timelines")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, no record")
    parser.add_argument("--name", default=None, help="of the record")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.stages = [int(number) for number in args.stages.split(",")]
    args.device, args.dtype = "cuda", torch.bfloat16
    config: Any = w1() if args.model == "w1" else get_preset(args.model)
    if args.layers is not None and args.model == "w1":
        config.num_hidden_layers = args.layers
    elif args.layers is not None:
        config = dataclasses.replace(config, n_layers=args.layers)
    if args.smoke:
        args.device, args.dtype, args.seq, args.slots = "cpu", torch.float32, 16, 12
        args.stages, args.micro_batches, args.warm, args.steps, args.peers = [4], 3, 1, 1, True
        if args.model == "w1":
            config = mixtral(
                4, hidden_size=32, intermediate_size=24, num_attention_heads=4,
                num_key_value_heads=4, num_local_experts=4,
            )  # fmt: skip
            config.vocab_size = 64
        else:
            small = {"n_layers": 4, "d_model": 32, "d_hidden": 24, "n_heads": 2, "n_experts": 4}
            config = dataclasses.replace(config, vocab=64, **small)
    found = measure(config, args)
    if not args.smoke:
        save(found, args)
        return
    for name, run in found.items():
        print(name, [f"{loss:.4f}" for loss in run["losses"]], run.get("uploads_per_expert", ""))


if __name__ == "__main__":
    main()
