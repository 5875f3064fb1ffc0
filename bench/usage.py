"""Frozen experts whose usage follows a Zipf law, with homes that follow usage and without.

PYTHONPATH=src python3 bench/usage.py --share 0.25 --tokens 16
PYTHONPATH=src python3 bench/usage.py --share 0.25 --tokens 256 --train
PYTHONPATH=src python3 bench/usage.py --device cpu --small
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from lora import W2, add_adapters
from record import Metric, metric, write_record
from torch import Tensor
from workload import time_steps

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.simulate import DrawnRouting, routed_by

SMALL = dataclasses.replace(W2, vocab=256, n_layers=3, d_model=64, d_hidden=32, n_heads=2)


def passes(model: GPTMoE, tokens: int, train: bool) -> Iterator[Tensor]:
    """Endless passes of one sequence of random tokens; with `train`, steps of adapters."""
    device = model.embedding.weight.device
    optimizer = torch.optim.AdamW(add_adapters(model, 16), lr=1e-4) if train else None
    for seed in itertools.count():
        generator = torch.Generator(device).manual_seed(seed)
        shape = (1, tokens + 1)
        ids = torch.randint(model.config.vocab, shape, device=device, generator=generator)
        with torch.set_grad_enabled(train):
            loss = model(ids[:, :-1], ids[:, 1:]).loss
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach()


def at_home(engine: Engine, routing: DrawnRouting) -> float:
    """The share of all assignments whose expert lives on the device."""
    found = [
        sum(routing.shares(layer)[expert] for expert in experts)
        for layer, experts in enumerate(engine.addresses.at_home)
    ]
    return sum(found) / len(found)


def measure(
    config: GPTConfig, args: argparse.Namespace, follow: bool
) -> tuple[list[float], float, float]:
    """Tokens a second of each pass, uploaded GiB a pass, and the share of assignments at home."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = GPTMoE(config, seed=0, meta_experts=True, device=device, dtype=dtype)
    model.requires_grad_(False).train(args.train)
    homes = int(args.share * config.n_layers * config.n_experts)
    overspill.offload(
        model,
        device=device,
        mode="host",
        slots=args.slots,
        gpu_experts=homes,
        settings=Settings(follow_usage=follow),
        quiet=True,
    )
    engine: Engine = model.overspill
    sizes = config.n_layers, config.n_experts, config.top_k
    routing = DrawnRouting.with_imbalance(*sizes, args.skew, zipf=True)
    with routed_by(model, routing):
        run = passes(model, args.tokens, args.train)
        seconds, _ = time_steps(run, args.warm, args.passes)
        uploads = [engine.recorder.counters().get("upload", 0)]
        for _ in range(args.counted):
            next(run)
        engine.flush()
        uploads.append(engine.recorder.counters().get("upload", 0))
    uploaded = (uploads[1] - uploads[0]) / args.counted / 2**30
    share = at_home(engine, routing)
    engine.close()
    return [args.tokens / each for each in seconds], uploaded, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skew", type=float, default=0.03, help="sum of squared shares; even: 1/E")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts live on the GPU")
    parser.add_argument("--slots", type=int, default=128, help="GPU slots of the others")
    parser.add_argument("--tokens", type=int, default=16, help="of a pass")
    parser.add_argument("--train", action="store_true", help="train adapters on attention")
    parser.add_argument("--warm", type=int, default=160, help="passes before the first one timed")
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--counted", type=int, default=8, help="passes whose uploads are counted")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model, to try the benchmark")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = SMALL if args.small else W2
    metrics: dict[str, Metric] = {}
    for name, follow in (("off", False), ("on", True)):
        speed, uploaded, share = measure(config, args, follow)
        metrics[f"tokens_per_second_{name}"] = metric(speed, "tokens/s")
        metrics[f"uploads_{name}"] = metric([uploaded], "GiB/pass")
        metrics[f"at_home_{name}"] = metric([100 * share], "% of assignments")
        median = metrics[f"tokens_per_second_{name}"].median
        print(
            f"follow_usage {name}: {median:,.0f} tok/s, {uploaded:.4f} GiB uploaded a pass, "
            f"{share:.1%} of the assignments at home",
            flush=True,
        )
    on, off = metrics["tokens_per_second_on"], metrics["tokens_per_second_off"]
    ratio = Metric(on.median / off.median, on.low / off.high, on.high / off.low, "×")
    print(f"speed-up {ratio.median:.2f}")
    work = "LoRA steps" if args.train else "inference"
    row = (
        f"{'small' if args.small else 'W2'} shape, frozen experts, {work}, {args.tokens} tokens a "
        f"pass, {args.share:g} of the experts on the GPU, Zipf usage (imbalance {args.skew:g}): "
        "homes that follow usage over homes in order"
    )
    given = {name: value for name, value in vars(args).items() if name != "out"}
    record = f"usage-{'lora' if args.train else 'inference'}-{args.tokens}"
    write_record(
        record,
        {"row": row, "show": list(metrics), **given},
        {"speedup": ratio, **metrics},
        None,
        args.out,
    )


if __name__ == "__main__":
    main()
