"""Training steps of a GPT-MoE beyond GPU memory: tokens a second, memory, and a timeline.

PYTHONPATH=src python3 bench/train.py --preset w1 --gpu-memory 12GiB --batches 16,64
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from record import Limit, metric, write_record

import overspill
from overspill.hardware.machine import peak_resident_memory
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.presets import get_preset
from overspill.moe.engine import Settings
from overspill.trace.perfetto import write_perfetto
from overspill.trace.picture import draw_timeline

SEQ = 1024
# The reference machine's measured ceilings (docs/benchmarks.md).
ADAM_RATE, PCIE, MATRIX = 4.4e9, 55e9, 786e12
DEEPSPEED = {16: "DeepSpeed ZeRO-3 offload: 5,200 tok/s", 64: "DeepSpeed ZeRO-3 offload: 17,700"}


@dataclass
class Run:
    """One measured workload."""

    tokens: int
    seconds: list[float]
    loss: float
    gpu_bytes: int
    host_bytes: int
    busy: dict[str, float]


def steps(
    model: GPTMoE, optimizer: overspill.AdamW, batch: int, pieces: int, seed: int = 0
) -> Iterator[float]:
    """Endless training steps on random tokens; yields each step's loss after it was issued."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    vocab = model.config.vocab
    while True:
        tokens = torch.randint(vocab, (batch, SEQ + 1), device="cuda", generator=generator)
        loss = model(tokens[:, :-1], tokens[:, 1:], pieces=pieces).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def measure(
    model: GPTMoE,
    optimizer: overspill.AdamW,
    batch: int,
    warm: int,
    count: int,
    pieces: int = 1,
    timeline: Path | None = None,
) -> Run:
    """Times `count` steps after `warm`; the clock stops when the last update has landed, or where
    updates overlap the next forward, at the same point of every step."""
    engine = model.overspill
    torch.cuda.reset_peak_memory_stats()
    run = steps(model, optimizer, batch, pieces)
    for _ in range(warm):
        next(run)
    torch.cuda.synchronize()
    seconds, loss = [], torch.zeros(())
    for _ in range(count):
        start = time.perf_counter()
        loss = next(run)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    gpu = torch.cuda.max_memory_reserved()
    engine.recorder.start()
    began = time.perf_counter_ns()
    for _ in range(2):
        next(run)
    torch.cuda.synchronize()
    ended = time.perf_counter_ns()
    engine.recorder.stop()
    busy = engine.recorder.busy(began, ended)
    if timeline is not None:
        spans = engine.recorder.spans()
        write_perfetto(spans, timeline.with_suffix(".json.gz"))
        draw_timeline(spans, timeline.with_suffix(".png"), f"{timeline.name}: two steps")
    engine.recorder.clear()
    return Run(batch * SEQ, seconds, float(loss), gpu, peak_resident_memory(), busy)


def limit(config: GPTConfig, tokens: int, offloaded: bool) -> Limit:
    """The slowest resource if everything else were free."""
    experts = config.expert_params
    active = config.total_params - experts + experts * config.top_k // config.n_experts
    times = {"GPU, 8 operations a parameter and token": 8 * active * tokens / MATRIX}
    if offloaded:
        times["CPU AdamW at 4.4 Gparam/s"] = experts / ADAM_RATE
        times["PCIe, every expert up twice"] = experts * 4 / PCIE
    source, seconds = max(times.items(), key=lambda item: item[1])
    return Limit(tokens / seconds, "tokens/s", source)


def show(name: str, run: Run) -> None:
    speed = run.tokens / sorted(run.seconds)[len(run.seconds) // 2]
    busy = " ".join(f"{row}={share:.2f}" for row, share in run.busy.items() if share)
    print(
        f"{name}: {speed:,.0f} tok/s, steps {[round(s, 3) for s in run.seconds]}, loss "
        f"{run.loss:.3f}, GPU {run.gpu_bytes / 2**30:.1f} GiB, host {run.host_bytes / 1e9:.1f} GB; "
        f"{busy}",
        flush=True,
    )


def save(name: str, config: GPTConfig, run: Run, offloaded: bool, args: argparse.Namespace) -> None:
    batch = run.tokens // SEQ
    per = run.host_bytes / config.expert_params
    metrics = {
        "tokens_per_second": metric([run.tokens / s for s in run.seconds], "tokens/s"),
        "step": metric(run.seconds, "s"),
        "gpu_memory": metric([run.gpu_bytes / 2**30], "GiB"),
        "host_memory_per_expert_parameter": metric([per], "B"),
        **{
            f"busy_{row.replace(' ', '_')}": metric([share], "share")
            for row, share in run.busy.items()
        },
    }
    details = {
        "row": f"{args.preset}, {batch}×{SEQ} tokens a step{', exact clipping' if 'clip' in name else ''}"
        f"{'' if offloaded else ', everything on the GPU'}",
        "compare": DEEPSPEED.get(batch, "") if offloaded else "DeepSpeed: 27,100 tok/s",
        "show": ["gpu_memory", "host_memory_per_expert_parameter"],
        "gpu_memory": args.gpu_memory,
        "expert_parameters": config.expert_params,
        "parameters": config.total_params,
        "dtype": "bf16 weights, fp32 master and moments",
        "warm": args.warm,
        "steps": args.steps,
    }
    write_record(name, details, metrics, limit(config, run.tokens, offloaded), args.out)


def build(config: GPTConfig, args: argparse.Namespace, settings: Settings | None = None) -> GPTMoE:
    start = time.perf_counter()
    model = GPTMoE(config, seed=0, meta_experts=True, device="cuda", dtype=torch.bfloat16)
    overspill.offload(model, gpu_memory=args.gpu_memory, mode=args.mode, settings=settings)
    print(f"offloaded in {time.perf_counter() - start:.1f} s", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="w1")
    parser.add_argument("--gpu-memory", default="12GiB")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--batches", default="16,64", help="sequences of 1024 tokens a step")
    parser.add_argument("--clip", default="no", choices=("no", "yes", "both"))
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--pieces", type=int, default=1)
    parser.add_argument("--timeline", type=Path, default=None, help="folder for timelines")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = get_preset(args.preset)
    model = build(config, args, Settings(threads=args.threads))
    engine = model.overspill
    offloaded = engine.placement.mode != "gpu"
    for norm in {"no": [None], "yes": [1.0], "both": [None, 1.0]}[args.clip]:
        start = time.perf_counter()
        engine.flush()
        optimizer = overspill.AdamW(model, lr=1e-4, max_grad_norm=norm)
        print(f"states in {time.perf_counter() - start:.1f} s: {engine.describe()}", flush=True)
        for batch in (int(text) for text in args.batches.split(",")):
            middle = "" if offloaded else "gpu-only-"
            name = f"train-{args.preset}-{middle}{batch}x{SEQ}{'' if norm is None else '-clip'}"
            timeline = None if args.timeline is None else args.timeline / name
            run = measure(model, optimizer, batch, args.warm, args.steps, args.pieces, timeline)
            show(name, run)
            save(name, config, run, offloaded, args)
        del optimizer
    engine.close()


if __name__ == "__main__":
    main()
