"""What four mechanisms are worth: each one switched off against all of them on.

CPU experts, the predictor, re-execution of delayed CPU tasks, and the native uploader, on W1
training steps, on frozen experts with 512 tokens (simulated and real routing), and on one-token
decode of a W2-shaped stack. Each round runs every variant once, so pairs are interleaved.

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
from overspill.compute.cpu_kernel import cpu_library
from overspill.models.presets import get_preset
from overspill.moe.layer import MoE
from overspill.moe.streaming import StreamingEngine
from overspill.simulate import DrawnRouting, routed_by
from overspill.transfer.driver import porter_calls
from overspill.transfer.loader import Loader
from overspill.transfer.ported import PortedLoader

MECHANISMS = ("cpu experts", "predictor", "re-execution", "native uploader")


class Block(nn.Module):
    """A residual Mixture-of-Experts block with its own router, and no attention."""

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


class Stack(nn.Sequential):
    def __init__(self, n_layers: int, d: int, h: int, e: int, k: int, gated: bool) -> None:
        super().__init__(*(Block(i, n_layers, d, h, e, k, gated) for i in range(n_layers)))
        self.d_model, self.n_layers, self.n_experts, self.top_k = d, n_layers, e, k


def set_uploader(engine: StreamingEngine, native: bool) -> None:
    """Replaces the uploader of an idle engine; the slots are filled again."""
    old = engine.loader
    if isinstance(old, PortedLoader) == native:
        return
    slab, lane, n_slots = old.slab, old.lane, len(old.slots)
    old.close()
    torch.cuda.synchronize()
    if native:
        calls = porter_calls(lane.stream)
        assert calls is not None
        new: Loader = PortedLoader(engine.store, slab, lane, n_slots, calls)
    else:
        new = Loader(engine.store, slab, lane, n_slots)
    new.overlap = engine.settings.overlap_uploads
    engine.loader = engine._waves.loader = new


def set_variant(engine: StreamingEngine, off: str | None) -> None:
    engine.flush()
    settings = dataclasses.replace(
        engine.settings, cpu_experts=off != "cpu experts", lookahead=int(off != "predictor")
    )
    engine.switch(settings)
    set_uploader(engine, off != "native uploader")
    cpu_library().overspill_allow_repeats(int(off != "re-execution"))


def in_rounds(
    engine: StreamingEngine, run: Callable[[], None], rounds: int, warm: int, each: int
) -> dict[str | None, list[float]]:
    """Seconds of a run with everything on (None) and with each mechanism off, round by round."""
    seconds: dict[str | None, list[float]] = {off: [] for off in (None, *MECHANISMS)}
    for number in range(rounds + 1):  # the first round warms up
        order = list(seconds) if number % 2 else list(seconds)[::-1]
        for off in order:
            set_variant(engine, off)
            for _ in range(warm):
                run()
            start = time.perf_counter()
            for _ in range(each):
                run()
            if number:
                seconds[off].append((time.perf_counter() - start) / each)
    set_variant(engine, None)
    return seconds


def table_row(work: str, seconds: dict[str | None, list[float]]) -> dict[str, str]:
    row = {"work": work, "all on": f"{statistics.median(seconds[None]) * 1e3:.1f} ms"}
    for off in MECHANISMS:
        pairs = [b / a for a, b in zip(seconds[None], seconds[off], strict=True)]
        row[f"{off} off"] = (
            f"{statistics.median(pairs):.3f}× ({min(pairs):.2f}–{max(pairs):.2f}), "
            f"{statistics.median(seconds[off]) * 1e3:.1f} ms"
        )
    print(row, flush=True)
    return row


def train_w1(rounds: int) -> dict[str | None, list[float]]:
    model = build(get_preset("w1"), overspill.Settings(cpu_experts=True), gpu_memory="12GiB")
    run = steps(model, optimize(model), Work(16))

    def step() -> None:
        next(run)
        torch.cuda.synchronize()

    found = in_rounds(model.overspill, step, rounds, warm=1, each=1)
    model.overspill.close()
    return found


def frozen(rounds: int, simulated: bool, share: float) -> dict[str | None, list[float]]:
    model = Stack(16, 1024, 4096, 16, 2, gated=False).eval().requires_grad_(False)
    settings = overspill.Settings(cpu_experts=True, pin_share=share)
    overspill.offload(model, mode="host", gpu_memory="24GiB", settings=settings)
    generator = torch.Generator(device="cuda").manual_seed(1)
    # the tokens have a direction in common, so that real gates prefer some experts
    common = 2 * torch.randn(1024, device="cuda", generator=generator)

    def there_and_back() -> None:
        x_TD = torch.randn(512, 1024, device="cuda", generator=generator) + common
        x_TD = x_TD.bfloat16().requires_grad_()
        model(x_TD).sum().backward()
        torch.cuda.synchronize()

    if simulated:
        with routed_by(model, DrawnRouting.with_imbalance(16, 16, 2, g=0.4, seed=1)):
            found = in_rounds(model.overspill, there_and_back, rounds, warm=2, each=3)
    else:
        found = in_rounds(model.overspill, there_and_back, rounds, warm=2, each=3)
    model.overspill.close()
    return found


def decode(rounds: int, share: float) -> dict[str | None, list[float]]:
    """One token at a time; a token resembles the one before it, as in text."""
    model = Stack(12, 2048, 768, 128, 8, gated=True).eval().requires_grad_(False)
    settings = overspill.Settings(cpu_experts=True, pin_share=share)
    overspill.offload(model, mode="host", gpu_memory="8GiB", settings=settings)
    print(model.overspill.describe(), flush=True)
    generator = torch.Generator(device="cuda").manual_seed(2)
    x_TD = torch.randn(1, 2048, device="cuda", generator=generator)

    @torch.no_grad()
    def token() -> None:
        nonlocal x_TD
        fresh = torch.randn(1, 2048, device="cuda", generator=generator)
        x_TD = 0.7 * x_TD + 0.7 * fresh
        model(x_TD.bfloat16())
        torch.cuda.synchronize()

    found = in_rounds(model.overspill, token, rounds, warm=4, each=10)
    model.overspill.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--works", default="decode,frozen,w1")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    found: dict[str, dict[str | None, list[float]]] = {}
    works = args.works.split(",")
    if "decode" in works:
        found["one-token decode, 12 layers of 128 experts 2048×768, top-8"] = decode(
            args.rounds, share=0.0
        )
        gc.collect()
    if "frozen" in works:
        name = "frozen experts, 512 tokens, forward and backward"
        found[f"{name}, G = 0.4"] = frozen(args.rounds, simulated=True, share=0.0)
        gc.collect()
        found[f"{name}, real gates"] = frozen(args.rounds, simulated=False, share=0.0)
        gc.collect()
        found[f"{name}, G = 0.4, a quarter of the slots unused"] = frozen(
            args.rounds, simulated=True, share=0.25
        )
        gc.collect()
    if "w1" in works:
        found["W1 training, 16×1024 tokens"] = train_w1(args.rounds)
    table = [table_row(work, seconds) for work, seconds in found.items()]
    metrics: dict[str, Metric] = {}
    for work, seconds in found.items():
        for off in MECHANISMS:
            pairs = [b / a for a, b in zip(seconds[None], seconds[off], strict=True)]
            metrics[f"{work}: {off}"] = Metric(
                statistics.median(pairs), min(pairs), max(pairs), "×"
            )
    config = {
        "row": "time with one mechanism off, as a multiple of the time with all of them on",
        "rounds": args.rounds,
    }
    write_record("worth", config, metrics, None, args.out, table)


if __name__ == "__main__":
    main()
