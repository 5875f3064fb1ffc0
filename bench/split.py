"""CPU experts, alternately on and off; the GPU alone uses all of its slots.

PYTHONPATH=src python3 bench/split.py frozen --timeline timelines
PYTHONPATH=src python3 bench/split.py sweep
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import Limit, Metric, metric, write_record
from torch import Tensor, nn

import overspill
from overspill.hardware.profile import ExpertCosts
from overspill.moe.autograd import routed_experts
from overspill.moe.engine import Engine
from overspill.moe.layer import MoE
from overspill.simulate import DrawnRouting, routed_by
from overspill.trace.perfetto import write_perfetto
from overspill.trace.picture import draw_timeline


class Sizes(NamedTuple):
    """Sizes of a stack; by default those of the records here."""

    n_layers: int = 16
    n_experts: int = 16
    top_k: int = 2
    d_model: int = 1024
    d_hidden: int = 4096
    gated: bool = False

    def __str__(self) -> str:
        return (
            f"{self.n_layers} MoE layers {self.d_model}×{self.d_hidden}, {self.n_experts} experts, "
            f"top-{self.top_k}"
        )


USUAL = Sizes()
N_LAYERS, N_EXPERTS, TOP_K, D_MODEL, D_HIDDEN, _ = USUAL
UNIFORM = 1 / N_EXPERTS


class Stack(nn.Module):
    """MoE layers without attention; the simulator replaces their routers."""

    def __init__(
        self, sizes: Sizes = USUAL, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.layers = nn.ModuleList(
            MoE(
                sizes.d_model,
                sizes.d_hidden,
                sizes.n_experts,
                sizes.top_k,
                gated=sizes.gated,
                layer=layer,
                n_layers=sizes.n_layers,
                meta_experts=True,
                device=device,
                dtype=dtype,
            )
            for layer in range(sizes.n_layers)
        )
        self.norm = nn.RMSNorm(sizes.d_model, device=device, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        ids_TK = torch.zeros(x_TD.shape[0], self.top_k, dtype=torch.int64, device=x_TD.device)
        weights_TK = torch.full(ids_TK.shape, 1 / self.top_k, device=x_TD.device)
        for layer in self.layers:
            x_TD = x_TD + routed_experts(layer.experts, self.norm(x_TD), ids_TK, weights_TK)
        return x_TD


def frozen_stack(gpu_memory: str) -> Stack:
    """All parameters are frozen and in host memory, without optimizer states."""
    model = Stack().eval().requires_grad_(False)
    settings = overspill.Settings(cpu_experts=True)
    overspill.offload(model, mode="host", gpu_memory=gpu_memory, settings=settings)
    return model


def passes(model: Stack, tokens: int) -> Callable[[], None]:
    x_TD = torch.randn(tokens, D_MODEL, device="cuda", dtype=torch.bfloat16)

    def forward_backward() -> None:
        x = x_TD.clone().requires_grad_()
        model(x).sum().backward()
        torch.cuda.synchronize()

    return forward_backward


def alternate(
    engine: Engine,
    run: Callable[[], None],
    rounds: int,
    each: int = 1,
    warm: int = 1,
    switches: Sequence[str] = ("cpu_experts",),
) -> tuple[list[float], list[float]]:
    """Seconds with and without CPU experts, interleaved, `rounds` times."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for on in (True, False):
            changed: dict[str, Any] = dict.fromkeys(switches, on)
            engine.switch(dataclasses.replace(engine.settings, **changed))
            for _ in range(warm):
                run()
            start = time.perf_counter()
            for _ in range(each):
                run()
            seconds[on].append((time.perf_counter() - start) / each)
    return seconds[True], seconds[False]


def ratio(on: Sequence[float], off: Sequence[float]) -> Metric:
    """The speed-up: ratio of the medians, lowest and highest ratio of a pair."""
    pairs = [b / a for a, b in zip(on, off, strict=True)]
    return Metric(statistics.median(off) / statistics.median(on), min(pairs), max(pairs), "×")


def costs_of(engine: Engine) -> ExpertCosts:
    streamer = engine.compute.streamer
    assert streamer is not None
    assert streamer.split is not None
    assert streamer.split.costs is not None
    return streamer.split.costs


def limit(costs: ExpertCosts) -> Limit:
    """Experts per second with CPU and link always busy, divided by the link alone."""
    cpu = 1 / (costs.cpu_forward(1) * costs.cpu_beside)
    link = 1 / costs.load_beside
    source = "CPU experts with one token and uploads at once, over uploads alone (probe)"
    return Limit((cpu + link) * costs.load, "×", source)


def frozen(args: argparse.Namespace) -> None:
    model = frozen_stack(args.gpu_memory)
    engine = model.overspill
    run = passes(model, 512)
    found = {}
    for zipf in (True, False):
        source = DrawnRouting.with_imbalance(N_LAYERS, N_EXPERTS, TOP_K, g=0.4, seed=1, zipf=zipf)
        with routed_by(model, source):
            on, off = found[zipf] = alternate(engine, run, args.rounds, each=3, warm=2)
            if args.timeline is not None and not zipf:
                draw(engine, run, args.timeline)
        print("zipf" if zipf else "hot", *map(statistics.median, (on, off)), flush=True)
    metrics = {
        "speedup": ratio(on, off),
        "shared": metric([s * 1e3 for s in on], "ms"),
        "gpu_alone": metric([s * 1e3 for s in off], "ms"),
        "speedup_under_zipf": ratio(*found[True]),
    }
    config = {
        "row": f"forward and backward, {N_LAYERS} MoE layers {D_MODEL}×{D_HIDDEN}, {N_EXPERTS} "
        "experts, top-2, frozen in host memory, 512 tokens, G = 0.4",
        "show": ["shared", "gpu_alone", "speedup_under_zipf"],
        "popularity": "two hot experts over a floor; under Zipf 6 of 16 experts get no token",
        "rounds": args.rounds,
        "threads": costs_of(engine).threads,
    }
    write_record("split-frozen-g0.4", config, metrics, limit(costs_of(engine)), args.out)
    engine.close()


def draw(engine: Engine, run: Callable[[], None], folder: Path) -> None:
    """Draws two layers of the forward with CPU and GPU experts."""
    engine.switch(dataclasses.replace(engine.settings, cpu_experts=True))
    run()
    engine.recorder.start()
    run()
    engine.recorder.stop()
    spans = engine.recorder.spans()
    jobs = [s for s in spans if s.row == "cpu compute" and s.name.startswith("forward")]
    if len(jobs) < 3:
        print("too few layers were shared in forward to draw them")
        return
    cpu = sorted(job.start_ns for job in jobs)
    middle = cpu[len(cpu) // 2 - 1 : len(cpu) // 2 + 2]
    shown = [s for s in spans if s.end_ns > middle[0] and s.start_ns < middle[-1]]
    write_perfetto(spans, folder / "timeline-shared.json.gz")
    draw_timeline(shown, folder / "timeline-shared.png", "Two layers, forward: CPU and GPU experts")
    engine.recorder.clear()


def sweep(args: argparse.Namespace) -> None:
    model = frozen_stack(args.gpu_memory)
    engine = model.overspill
    table, worst = [], None
    for tokens in map(int, args.tokens.split(",")):
        run = passes(model, tokens)
        row: dict[str, str] = {"tokens": f"{tokens:,}"}
        for g in (UNIFORM, *map(float, args.g.split(","))):
            # two distinct experts per token limit G to one half; the paper allows repeated ones
            source = DrawnRouting.with_imbalance(
                N_LAYERS, N_EXPERTS, TOP_K, g=g, seed=1, repeat=g > 1 / TOP_K
            )
            with routed_by(model, source):
                on, off = alternate(engine, run, args.rounds, each=1 if tokens > 8192 else 2)
            found = ratio(on, off)
            name = "uniform" if g == UNIFORM else f"G = {g}"
            row[name] = f"{found.median:.2f}× ({statistics.median(off) * 1e3:.0f} ms)"
            print(tokens, name, f"{found.median:.3f} {found.low:.3f}–{found.high:.3f}", flush=True)
            worst = found if worst is None or found.median < worst.median else worst
        table.append(row)
    assert worst is not None
    config = {
        "row": f"the same over tokens and G, faster by (GPU alone): {N_LAYERS} layers, frozen",
        "rounds": args.rounds,
        "threads": costs_of(engine).threads,
    }
    write_record("split-sweep", config, {"least": worst}, None, args.out, table)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=("frozen", "sweep"))
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="128,512,2048,8192,32768", help="of the sweep")
    parser.add_argument("--g", default="0.1,0.2,0.4,0.6", help="of the sweep, besides uniform")
    parser.add_argument("--timeline", type=Path, default=None, help="folder for a timeline")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    {"frozen": frozen, "sweep": sweep}[args.work](args)


if __name__ == "__main__":
    main()
