"""Training steps of a Mixtral from Hugging Face transformers in a plain PyTorch loop.

PYTHONPATH=src python3 bench/hf_train.py --shape w1 --batch 16 --gpu-memory 12GiB
PYTHONPATH=src python3 bench/hf_train.py --shape largest --batch 8 --gpu-memory 24GiB --disk FOLDER
PYTHONPATH=src python3 bench/hf_train.py --shape largest --moments fp32 --batch 8 \
    --gpu-memory 16GiB --disk FOLDER --warm 1 --steps 2
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from record import Limit, metric, write_record
from ssd import disk_bandwidth
from train import ADAM_RATE, MATRIX, PCIE
from transformers import MixtralConfig
from workload import SEQ, Run, measure_steps, show

import overspill
from overspill.core.errors import BudgetError
from overspill.core.experts import ExpertShape
from overspill.hardware.machine import available_memory
from overspill.models.budgets import Budgets
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.plan.budget import ModelSizes, place
from overspill.tiers.layout import RecordLayout
from overspill.trace.spans import STEP

BF16_ADAM_RATE = 7.15e9


def mixtral(layers: int, **shape: int) -> MixtralConfig:
    return MixtralConfig(
        num_hidden_layers=layers,
        num_experts_per_tok=2,
        max_position_embeddings=SEQ,
        vocab_size=32_000,
        tie_word_embeddings=False,
        **shape,
    )


def w1() -> MixtralConfig:
    return mixtral(
        24,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_local_experts=16,
    )


def mixtral_8x7b(layers: int) -> MixtralConfig:
    return mixtral(
        layers,
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
    )


def largest(budgets: Budgets) -> MixtralConfig:
    """Mixtral-8x7B with as many layers as the planner can place."""
    request = budgets.request(torch.device("cuda", 0))
    for layers in range(32, 0, -1):
        config = mixtral_8x7b(layers)
        width, kv = config.hidden_size, config.hidden_size // 4
        shape = ExpertShape(width, config.intermediate_size, gated=True)
        layout = RecordLayout(shape, torch.bfloat16, budgets.state_dtype)
        each = 2 * width * width + 2 * width * kv + (config.num_local_experts + 2) * width
        dense = 2 * config.vocab_size * width + layers * each
        token_bytes = (2 * shape.in_rows + 2 * shape.d_hidden + 3 * width) * 2
        sizes = ModelSizes(
            layers, 8, layout.weight_bytes, layout.state_bytes, 4 * dense, 10 * dense, token_bytes,
            training=True,
        )  # fmt: skip
        try:
            place(sizes, request)
        except BudgetError as error:
            print(f"{layers} layers: {error}", flush=True)
        else:
            return config
    raise SystemExit("not even one layer fits")


def steps(model: Any, optimizer: overspill.AdamW, batch: int, rounds: int) -> Iterator[Any]:
    """A typical training loop."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    vocab = model.config.vocab_size
    while True:
        tokens = torch.randint(vocab, (batch, SEQ), device="cuda", generator=generator)
        for number, part in enumerate(tokens.chunk(rounds), start=1):
            with contextlib.nullcontext() if number == rounds else optimizer.accumulate():
                loss = model(input_ids=part, labels=part).loss / rounds
                loss.backward()
        optimizer.step()
        model.overspill.recorder.mark(STEP)
        optimizer.zero_grad()
        yield loss.detach() * rounds


def limit(engine: Engine, dense: int, run: Run, rounds: int, disk: float | None) -> Limit:
    """The slowest resource if all others were unlimited."""
    tokens = run.tokens
    active = dense + engine.expert_parameters * 2 // engine.n_experts
    experts = engine.expert_parameters * (1 - run.on_gpu)  # that are streamed
    narrow = engine.layout.state_dtype == torch.bfloat16
    rate = BF16_ADAM_RATE if narrow else ADAM_RATE
    times = {
        "GPU, 8 operations per parameter and token": 8 * active * tokens / MATRIX,
        f"CPU AdamW alone at {rate / 1e9:g} Gparam/s": experts / rate,
        "PCIe, every expert uploaded twice per micro-batch": rounds * experts * 4 / PCIE,
    }
    if disk is not None:
        spilled = engine.placement.disk_slots
        record = engine.layout.weight_bytes + engine.layout.state_bytes
        times["disk, spilled records read and written once"] = 2 * spilled * record / disk
    source, seconds = max(times.items(), key=lambda item: item[1])
    return Limit(tokens / seconds, "tokens/s", source)


def save(name: str, engine: Engine, dense: int, run: Run, disk: Any, args: Any) -> None:
    metrics = {
        "tokens_per_second": metric(run.speed, "tokens/s"),
        "step": metric(run.seconds, "s"),
        "gpu_memory": metric([run.gpu_bytes / 2**30], "GiB"),
        "host_memory": metric([run.host_bytes / 2**30], "GiB"),
    }
    for lane, share in run.busy.items():
        metrics[f"busy_{lane.replace(' ', '_')}"] = metric([share], "share")
    total = dense + engine.expert_parameters
    shape = "W1 as Mixtral" if args.shape == "w1" else f"Mixtral-8x7B, {engine.n_layers} layers"
    row = f"{shape} ({total / 1e9:.1f} B), {args.batch}×{SEQ} tokens per step"
    if args.accumulate > 1:
        row += f" in {args.accumulate} micro-batches"
    details = {
        "row": f"{row}, {args.gpu_memory}",
        "show": ["gpu_memory", "host_memory"],
        "gpu_memory": args.gpu_memory,
        "parameters": total,
        "placement": engine.describe(),
        "moments": str(engine.layout.state_dtype),
        "loop": "plain PyTorch, gradient checkpointing, no clipping",
    }
    bandwidth = None if disk is None else disk["both"]
    metrics["experts_on_gpu"] = metric([100 * run.on_gpu], "%")
    ceiling = limit(engine, dense, run, args.accumulate, bandwidth)
    write_record(name, details, metrics, ceiling, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="w1", choices=("w1", "largest"))
    parser.add_argument("--batch", type=int, default=16, help="sequences of 1024 tokens per step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--gpu-memory", default="12GiB")
    parser.add_argument("--host-memory", default=None)
    parser.add_argument("--disk", type=Path, default=None)
    parser.add_argument("--moments", choices=("bf16", "fp32"), help="default: bf16 for 'largest'")
    parser.add_argument("--slots", type=int, default=None, help="GPU slots")
    parser.add_argument("--warm", type=int, default=8, help="experts move in the first few steps")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeline", type=Path, default=None, help="folder for timelines")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    big = args.shape == "largest"
    if big and args.host_memory is None:
        args.host_memory = int(0.94 * available_memory())  # the same for the plan and the run
    args.moments = args.moments or ("bf16" if big else "fp32")
    budgets = Budgets(
        gpu_memory=args.gpu_memory,
        host_memory=args.host_memory,
        disk=args.disk,
        slots=args.slots,
        settings=Settings(),
        state_dtype=torch.bfloat16 if args.moments == "bf16" else torch.float32,
        keep_gradients=args.accumulate > 1,
    )
    disk = disk_bandwidth(args.disk, 80 << 20, 96) if args.disk is not None else None
    config = largest(budgets) if big else w1()
    start = time.perf_counter()
    model = overspill.from_config(
        config,
        budgets.gpu_memory,
        budgets.host_memory,
        budgets.disk,
        dtype=torch.bfloat16,
        slots=args.slots,
        state_dtype=budgets.state_dtype,
        keep_gradients=budgets.keep_gradients,
        quiet=True,
    )
    model.gradient_checkpointing_enable()
    engine = model.overspill
    print(f"made in {time.perf_counter() - start:.1f} s: {engine.describe()}", flush=True)
    optimizer = overspill.AdamW(model, lr=1e-4)
    print(f"ready in {time.perf_counter() - start:.1f} s: {engine.describe()}", flush=True)
    name = f"train-hf-w1-{args.batch}x{SEQ}"
    if big:
        name = "train-hf-largest" if args.moments == "bf16" else "dense-offload-mixtral"
    elif args.accumulate > 1:
        name += f"-accumulate-{args.accumulate}"
        if args.gpu_memory != "12GiB":
            name += f"-{args.gpu_memory.lower()}"
    timeline = None if args.timeline is None else args.timeline / name
    run = steps(model, optimizer, args.batch, args.accumulate)
    traced = 1 if big else 2
    tokens = args.batch * SEQ
    title = f"Mixtral, {args.batch}×{SEQ} tokens a step, {args.gpu_memory} of GPU memory"
    measured = measure_steps(engine, run, tokens, args.warm, args.steps, timeline, traced, title)
    show(name, measured)
    dense = model.num_parameters() - engine.expert_parameters
    save(name, engine, dense, measured, disk, args)
    engine.close()


if __name__ == "__main__":
    main()
