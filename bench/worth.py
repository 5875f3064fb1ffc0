"""The gain of CPU experts and of the native uploader: each one off, compared with both on.

On W1 training steps, on frozen experts with 512 tokens (drawn and real routing), and on one-token
decode of a W2-shaped stack. Each round runs every variant once, so pairs are interleaved. The
record of 2251961 also has the predictor and the re-execution of delayed CPU tasks, which gained
nothing and were deleted.

PYTHONPATH=src python3 bench/worth.py --out out
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import Metric, write_record
from torch import Tensor, nn
from workload import Work, build, optimize, steps

import overspill
from overspill.models.presets import get_preset
from overspill.moe.engine import Engine
from overspill.moe.layer import MoE
from overspill.moe.settings import Settings
from overspill.simulate import DrawnRouting, routed_by

ON = Settings(cpu_experts=True, uploader="native")
VARIANTS: dict[str, Settings] = {
    "": ON,
    "cpu experts": dataclasses.replace(ON, cpu_experts=False),
    "native uploader": dataclasses.replace(ON, uploader="thread"),
}


class Block(nn.Module):
    """A residual Mixture-of-Experts block with a router and without attention."""

    def __init__(self, layer: int, n_layers: int, d: int, h: int, e: int, k: int, gated: bool):
        super().__init__()
        self.norm = nn.RMSNorm(d, device="cuda", dtype=torch.bfloat16)
        self.moe = MoE(
            d, h, e, k, gated=gated, layer=layer, n_layers=n_layers, meta_experts=True,
            device="cuda", dtype=torch.bfloat16,
        )  # fmt: skip

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD, _ = self.moe(self.norm(x_TD))
        return x_TD + y_TD


def frozen_stack(
    n_layers: int, d: int, h: int, e: int, k: int, gated: bool, gpu_memory: str
) -> nn.Sequential:
    blocks = [Block(layer, n_layers, d, h, e, k, gated) for layer in range(n_layers)]
    model = nn.Sequential(*blocks).eval().requires_grad_(False)
    overspill.offload(model, mode="host", gpu_memory=gpu_memory, settings=ON)
    return model


def in_rounds(
    engine: Engine, run: Callable[[], None], rounds: int, warm: int, each: int
) -> dict[str, list[float]]:
    """Seconds of a run with everything on ("") and with each mechanism off, round by round."""
    seconds: dict[str, list[float]] = {off: [] for off in VARIANTS}
    for number in range(rounds + 1):  # the first round warms up
        for off in list(VARIANTS) if number % 2 else list(VARIANTS)[::-1]:
            engine.switch(VARIANTS[off])
            for _ in range(warm):
                run()
            start = time.perf_counter()
            for _ in range(each):
                run()
            if number:
                seconds[off].append((time.perf_counter() - start) / each)
    engine.close()
    gc.collect()
    return seconds


def train_w1(rounds: int) -> dict[str, list[float]]:
    model = build(get_preset("w1"), ON, gpu_memory="12GiB")
    run = steps(model, optimize(model), Work(16))

    def step() -> None:
        next(run)
        torch.cuda.synchronize()

    return in_rounds(model.overspill, step, rounds, warm=1, each=1)


def frozen(rounds: int, drawn: bool) -> dict[str, list[float]]:
    model = frozen_stack(16, 1024, 4096, 16, 2, gated=False, gpu_memory="24GiB")
    generator = torch.Generator(device="cuda").manual_seed(1)
    # tokens share a direction, so that real routers prefer some experts
    common = 2 * torch.randn(1024, device="cuda", generator=generator)

    def forward_backward() -> None:
        x_TD = torch.randn(512, 1024, device="cuda", generator=generator) + common
        x_TD = x_TD.bfloat16().requires_grad_()
        model(x_TD).sum().backward()
        torch.cuda.synchronize()

    if drawn:
        with routed_by(model, DrawnRouting.with_imbalance(16, 16, 2, g=0.4, seed=1)):
            return in_rounds(model.overspill, forward_backward, rounds, warm=2, each=3)
    return in_rounds(model.overspill, forward_backward, rounds, warm=2, each=3)


def decode(rounds: int) -> dict[str, list[float]]:
    """One token at a time; a token is similar to the previous one, as in text."""
    model = frozen_stack(12, 2048, 768, 128, 8, gated=True, gpu_memory="8GiB")
    generator = torch.Generator(device="cuda").manual_seed(2)
    x_TD = torch.randn(1, 2048, device="cuda", generator=generator)

    @torch.no_grad()
    def token() -> None:
        nonlocal x_TD
        fresh = torch.randn(1, 2048, device="cuda", generator=generator)
        x_TD = 0.7 * x_TD + 0.7 * fresh
        model(x_TD.bfloat16())
        torch.cuda.synchronize()

    return in_rounds(model.overspill, token, rounds, warm=4, each=10)


WORKS: dict[str, tuple[str, Callable[[int], dict[str, list[float]]]]] = {
    "decode": ("one-token decode, 12 layers of 128 experts 2048×768, top-8", decode),
    "frozen": (
        "frozen experts, 512 tokens, forward and backward, G = 0.4",
        lambda rounds: frozen(rounds, drawn=True),
    ),
    "gates": (
        "frozen experts, 512 tokens, forward and backward, real gates",
        lambda rounds: frozen(rounds, drawn=False),
    ),
    "w1": ("W1 training, 16×1024 tokens", train_w1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    table: list[dict[str, str]] = []
    metrics: dict[str, Metric] = {}
    for key in args.works.split(","):
        work, measure = WORKS[key]
        seconds = measure(args.rounds)
        row = {"work": work, "all on": f"{statistics.median(seconds['']) * 1e3:.1f} ms"}
        for off in list(VARIANTS)[1:]:
            pairs = [b / a for a, b in zip(seconds[""], seconds[off], strict=True)]
            found = Metric(statistics.median(pairs), min(pairs), max(pairs), "×")
            metrics[f"{work}: {off}"] = found
            row[f"{off} off"] = (
                f"{found.median:.3f}× ({found.low:.2f}–{found.high:.2f}), "
                f"{statistics.median(seconds[off]) * 1e3:.1f} ms"
            )
        print(row, flush=True)
        table.append(row)
    config = {
        "row": "time with one mechanism off, as a multiple of the time with all of them on",
        "rounds": args.rounds,
    }
    write_record("worth", config, metrics, None, args.out, table)


if __name__ == "__main__":
    main()
