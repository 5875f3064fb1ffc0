"""Modes of serving compared: experts on the GPU, copied on demand, ahead of their use, or all.

PYTHONPATH=src python3 bench/pregate.py switch-64 switch-128 latency cache memory w2 \
    --routing gptoss20b_decode_experts_only.npz
PYTHONPATH=src python3 bench/pregate.py ssd --disk FOLDER
PYTHONPATH=src python3 bench/pregate.py timeline --timeline FOLDER
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import Limit, Metric, metric, write_record
from serve import HOST, Even, decode, host_bandwidth, read_routing, w2
from serve_timeline import draw_tokens, record_tokens
from ssd import disk_bandwidth

import overspill
from overspill.core.garbage import short_collections
from overspill.models.config import GPTConfig
from overspill.simulate import DrawnRouting, routed_by

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COPIED = "pre-gated, copied"
"""Mode of the paper: the CPU computes nothing."""
COPYING = ("on-demand", "prefetch-all", "lookahead", COPIED)
GPU_ONLY = "gpu-only"


def flags_of(mode: str) -> dict[str, str]:
    """The arguments of `overspill.LLM` for a mode as the tables name it."""
    if mode in (COPIED, "pre-gated") and DEVICE == "cuda":  # elsewhere nothing migrates
        return {"mode": "pre-gated", "migrate": "copy" if mode == COPIED else "cpu"}
    if mode == COPIED:
        return {"mode": "pre-gated"}
    return {"mode": "auto" if mode == GPU_ONLY else mode}


def switch(n_experts: int, top_k: int = 1) -> GPTConfig:
    """The decoder of Switch-Base: every second layer has experts."""
    return GPTConfig(
        vocab=32_128, n_layers=12, d_model=768, d_hidden=3072, n_heads=12, n_experts=n_experts,
        top_k=top_k, moe_every=2, max_seq=1024,
    )  # fmt: skip


def build(config: GPTConfig, level: int = 1, disk: Path | None = None, **budgets: Any) -> Any:
    """A model with pre-gates, or without if the level is 0, whose experts are in host memory."""
    dtype = torch.bfloat16
    model = overspill.GPTMoE(
        config, checkpoint=False, meta_experts=True, device=DEVICE, dtype=dtype
    )
    if level:
        overspill.pregate(model.eval(), level)
    settings = overspill.Settings(residency=False)
    return overspill.offload(
        model.eval(), disk=disk, quiet=True, progress=False, settings=settings, **budgets
    )


class Speed(NamedTuple):
    tokens: list[float]  # of a request in a second, in each round
    peak: int  # bytes of GPU memory
    token_ids: list[int]  # of a greedy request
    missing: list[float]  # experts of a step that were not on the GPU, in each round


def measure(
    model: Any,
    mode: str,
    rounds: int,
    tokens: int,
    slots: int = 0,
    routing: Callable[[], Any] | None = None,
    size: int = 1,
    policy: str = "lfu",
) -> Speed:
    """`size` requests at once; copies of experts leave `slots` by `policy`."""
    engine = model.overspill
    on_gpu = mode == GPU_ONLY
    residents = [engine.n_experts if on_gpu else 0] * engine.n_layers
    if engine.residents != residents:
        engine.set_residents(residents)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    chosen: AbstractContextManager[None] = nullcontext()
    if routing is not None:
        chosen = routed_by(model, routing())  # from its beginning
    sizes: dict[str, int] = {"context": 512, "max_batch": size, "slots": slots}
    with (
        overspill.LLM(model, **sizes, **flags_of(mode), cache_policy=policy) as llm,
        short_collections(),
        chosen,
    ):
        if slots:
            decode(llm, 1, tokens, 2)  # the cache learns
        found = decode(llm, size, tokens, rounds)
        greedy = overspill.SamplingParams(max_tokens=min(32, tokens), ignore_eos=True)
        ids = list(llm.generate([[5, 6, 7]], greedy)[0].token_ids)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    speeds = [each.speed / size for each in found]
    return Speed(speeds, peak, ids, [each.missing for each in found])


def compare(
    model: Any, modes: Sequence[str], args: argparse.Namespace, **options: Any
) -> dict[str, Speed]:
    """Interleaved would be fairer, but every change of a mode moves all experts."""
    found = {}
    for mode in modes:
        tokens = min(args.tokens, 8) if mode == "prefetch-all" else args.tokens
        found[mode] = measure(model, mode, args.rounds, tokens, **options)
        show(mode, found[mode])
    compare_tokens(found)
    return found


def show(mode: str, found: Speed) -> None:
    speed = statistics.median(found.tokens)
    print(f"  {mode:17s} {speed:8.1f} tokens/s, {found.peak / 2**20:,.0f} MiB", flush=True)


def compare_tokens(found: dict[str, Speed]) -> list[str]:
    """The modes whose greedy tokens differ from those of the first one. With bf16 the CPU rounds
    differently."""
    first, expected = next((mode, each.token_ids) for mode, each in found.items())
    others = [
        mode for mode, each in found.items() if each.token_ids != expected[: len(each.token_ids)]
    ]
    for mode in others:
        print(f"  {mode}: other tokens than {first}", flush=True)
    return others


def rows(found: dict[str, Speed], n_blocks: int, **more: Any) -> list[dict[str, Any]]:
    return [
        more
        | {
            "mode": mode,
            "tokens/s": round(statistics.median(each.tokens), 1),
            "ms a block": round(1e3 / statistics.median(each.tokens) / n_blocks, 3),
            "peak MiB": round(each.peak / 2**20),
        }
        for mode, each in found.items()
    ]


def ratios(found: dict[str, Speed]) -> dict[str, Metric]:
    own = statistics.median(found["pre-gated"].tokens)
    others = {mode: statistics.median(each.tokens) for mode, each in found.items()}
    return {
        f"over_{mode.replace('-', '_')}": metric([own / speed], "times")
        for mode, speed in others.items()
        if mode not in ("pre-gated", COPIED)
    }


def host_limit(model: Any) -> Limit:
    """The CPU reads every expert of a token."""
    engine, config = model.overspill, model.config
    nbytes = engine.n_layers * config.top_k * engine.layout.weight_bytes
    return Limit(host_bandwidth() / nbytes, "tokens/s", HOST)


def run_switch(n_experts: int, args: argparse.Namespace) -> None:
    model = build(switch(n_experts))
    modes = (GPU_ONLY, "on-demand", "prefetch-all", COPIED, "pre-gated")
    found = compare(model, modes, args)
    conventional = build(switch(n_experts), level=0)
    found |= compare(conventional, ("auto", "lookahead"), args)
    conventional.overspill.close()
    metrics = {"tokens_per_second": metric(found["pre-gated"].tokens, "tokens/s")} | ratios(found)
    details = {
        "row": f"Switch-Base-{n_experts} shape, one request, pre-gated, nothing cached",
        "compare": "paper: 0.81 of GPU-only, 1.5 times on-demand, 27 times prefetch-all",
        "tokens": args.tokens,
    }
    n_blocks = model.overspill.n_layers
    limit = host_limit(model)
    model.overspill.close()
    write_record(
        f"pregate-switch-{n_experts}", details, metrics, limit, args.out, rows(found, n_blocks)
    )


def run_w2(args: argparse.Namespace) -> None:
    """A quarter of the experts cached, routing of gpt-oss: the model with pre-gates, and the
    conventional one."""
    settings = overspill.Settings(residency=False)
    found: dict[str, Speed] = {}
    for level in (0, 1):
        model = overspill.from_config(
            w2(), dtype=torch.bfloat16, train=False, quiet=True, settings=settings
        )
        if level:
            overspill.pregate(model)
        engine = model.overspill
        routing = partial(read_routing, args.routing, engine.n_layers, engine.n_experts)
        modes = ("auto", "pre-gated", COPIED, "on-demand") if level else ("auto", "lookahead")
        each = compare(model, modes, args, slots=384, routing=routing)
        gates = "pre-gates" if level else "conventional"
        found |= {f"{mode}, {gates}": speed for mode, speed in each.items()}
        n_blocks = engine.n_layers
        engine.close()
    own = found["auto, pre-gates"].tokens
    best = max(statistics.median(each.tokens) for each in found.values())
    metrics = {
        "tokens_per_second": metric(own, "tokens/s"),
        "share_of_the_best": metric([100 * statistics.median(own) / best], "%"),
    }
    details = {"row": "W2, one request, a quarter cached, routing of gpt-oss, auto with pre-gates"}
    write_record("pregate-w2", details, metrics, None, args.out, rows(found, n_blocks))


def run_latency(args: argparse.Namespace) -> None:
    """Requests whose tokens all need other experts: so many are active in a block."""
    model = build(switch(64))
    engine = model.overspill
    table: list[dict[str, Any]] = []
    headline: dict[str, Metric] = {}
    even = Even(engine.n_layers, engine.n_experts, 1)
    for active in (1, 4, 16, 64):
        print(f" {active} active experts", flush=True)
        modes = (GPU_ONLY, *COPYING, "pre-gated")
        found = compare(model, modes, args, routing=lambda: even, size=active)
        table += rows(found, engine.n_layers, active=active)
        own = [1e3 / speed / engine.n_layers for speed in found["pre-gated"].tokens]
        headline[f"block_of_{active}"] = metric(own, "ms")
    engine.close()
    row = "Switch-Base-64 shape, MoE block of a pre-gated model, by active experts"
    write_record("pregate-latency", {"row": row}, headline, None, args.out, table)


def run_cache(args: argparse.Namespace) -> None:
    model = build(switch(128))
    engine = model.overspill
    table: list[dict[str, Any]] = []
    total = engine.n_layers * engine.n_experts
    headline: dict[str, Metric] = {}
    cases = [("none", 0), *((name, share) for name in ("LRU", "LFU") for share in (1, 5, 10, 20))]
    for name, percent in cases:
        print(f" {name}, {percent}%", flush=True)
        policy = "lru" if name == "LRU" else "lfu"
        options: dict[str, Any] = {"slots": round(percent * total / 100), "policy": policy}
        found = compare(model, ("on-demand", COPIED, "pre-gated"), args, **options)
        table += rows(found, engine.n_layers, policy=name, cached=f"{percent}%")
        headline[f"{name.lower()}_{percent}"] = metric(found["pre-gated"].tokens, "tokens/s")
    engine.close()
    row = "Switch-Base-128 shape, one request, pre-gated, by the share of experts cached"
    write_record("pregate-cache", {"row": row}, headline, None, args.out, table)


def run_memory(args: argparse.Namespace) -> None:
    """Peak memory, and its part for parameters: without the memory that GPU-only needs for
    everything else, such as keys and values. GPU slots for prompts are as few as possible."""
    model = build(switch(128), slots=2)
    engine = model.overspill
    dense = sum(p.nbytes for p in model.parameters() if p.device.type == DEVICE)
    size = engine.layout.weight_bytes
    found = compare(model, (GPU_ONLY, *COPYING, "pre-gated"), args)
    everything = dense + engine.n_layers * engine.n_experts * size
    other = found[GPU_ONLY].peak - everything
    equation = dense + 2 * model.config.top_k * size
    table = [
        row | {"parameters MiB": round((each.peak - other) / 2**20)}
        for row, each in zip(rows(found, engine.n_layers), found.values(), strict=True)
    ]
    engine.close()
    headline = {"equation_1": metric([equation / 2**20], "MiB")}
    for name, mode in (("pre_gated", "pre-gated"), ("copied", COPIED)):
        own = found[mode].peak - other
        headline[name] = metric([own / 2**20], "MiB")
        headline[f"{name}_over_equation_1"] = metric([100 * (own / equation - 1)], "%")
    row = "Switch-Base-128 shape, one request, parameters in GPU memory by equation 1"
    write_record("pregate-memory", {"row": row}, headline, None, args.out, table)


def run_ssd(args: argparse.Namespace) -> None:
    model = build(switch(64), disk=args.disk, mode="disk", slots=8, host_slots=96)
    engine = model.overspill
    shares = [[1 / engine.n_experts] * engine.n_experts] * engine.n_layers
    bandwidth = disk_bandwidth(args.disk, engine.layout.weight_bytes, 256)["read"]
    found = {}
    for modes, tokens in ((("on-demand", "pre-gated"), 24), (("prefetch-all",), 2)):
        few = argparse.Namespace(**{**vars(args), "tokens": min(tokens, args.tokens)})
        found |= compare(model, modes, few, routing=lambda: DrawnRouting(shares, 1))
    metrics = {"tokens_per_second": metric(found["pre-gated"].tokens, "tokens/s")} | ratios(found)
    details = {
        "row": "Switch-Base-64 shape, one request, a quarter in host memory, the rest on disk, "
        "even routing, pre-gated",
        "placement": engine.describe(),
    }
    table = rows(found, engine.n_layers)
    total = engine.n_layers * engine.n_experts
    nbytes = engine.n_layers * engine.layout.weight_bytes * (1 - engine.memory.cache_slots / total)
    limit = Limit(bandwidth / nbytes, "tokens/s", "reading experts from disk")
    engine.close()
    write_record("pregate-ssd", details, metrics, limit, args.out, table)


def run_timeline(args: argparse.Namespace) -> None:
    """Two tokens: experts of later blocks are copied, or loaded by the CPU, meanwhile."""
    model = build(switch(64))
    model.overspill.set_residents([0] * model.overspill.n_layers)
    for mode, name in ((COPIED, "copied"), ("pre-gated", "cpu")):
        with overspill.LLM(model, context=512, slots=0, **flags_of(mode)) as llm:
            spans = record_tokens(llm, 1, 40)
        path = args.timeline / f"timeline-pre-gated-{name}"
        draw_tokens(spans, path, f"Switch-Base-64 shape, {mode}: two tokens")
    model.overspill.close()


RUNS: dict[str, Callable[[argparse.Namespace], None]] = {
    "switch-64": partial(run_switch, 64),
    "switch-128": partial(run_switch, 128),
    "w2": run_w2,
    "latency": run_latency,
    "cache": run_cache,
    "memory": run_memory,
    "ssd": run_ssd,
    "timeline": run_timeline,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*RUNS])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--routing", type=Path, help="recorded routing of gpt-oss")
    parser.add_argument("--disk", type=Path, help="folder for experts, for ssd")
    parser.add_argument("--timeline", type=Path, help="folder for timelines")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    for name in args.names:
        print(name, flush=True)
        RUNS[name](args)


if __name__ == "__main__":
    main()
