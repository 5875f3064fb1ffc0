"""Full fine-tuning with experts that the CPU trains, alternately on and off.

PYTHONPATH=src python3 bench/apt_train.py stack --link 8       # record apt-train-8, as --link 16
PYTHONPATH=src python3 bench/apt_train.py many                 # record apt-train-many: 128 experts
PYTHONPATH=src python3 bench/apt_train.py w1                   # record apt-w1
PYTHONPATH=src python3 bench/apt_train.py stack --smoke        # tiny, on the CPU

All experts pass through GPU slots, and the optimizer updates them on the cores that compute CPU
experts. `--link` is the share of the link that a GPU has where several use it, in GB/s.
"""

import argparse
import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from record import Metric, metric, write_record
from split import Sizes, Stack, alternate, ratio
from throttle import throttled
from torch import nn
from workload import Work, build, optimize, steps, synchronize

import overspill
from overspill.core.experts import Phase
from overspill.models.presets import get_preset
from overspill.moe.engine import Engine
from overspill.simulate import DrawnRouting, routed_by
from overspill.trace.perfetto import write_perfetto
from overspill.trace.picture import draw_timeline

STACKS = {"stack": Sizes(), "many": Sizes(6, 128, 8, 2048, 768, gated=True)}
TINY = {"stack": Sizes(2, 4, 2, 32, 48), "many": Sizes(2, 8, 4, 32, 16, gated=True)}
SWITCHES = "cpu_experts", "cpu_training"


def few(counts: Sequence[int], phase: Phase) -> frozenset[int]:
    """Without a GPU nothing is measured: the rarer half of the experts."""
    ranked = sorted(range(len(counts)), key=lambda position: counts[position])
    return frozenset(ranked[: len(counts) // 2])


def settings(args: argparse.Namespace, residency: bool) -> overspill.Settings:
    return overspill.Settings(
        cpu_experts=True,
        cpu_training=True,
        cpu_policy=few if args.smoke else None,
        residency=residency,
        uploader="auto" if args.link is None else "thread",
        threads=args.threads,
    )


def follow_link(engine: Engine, link: float | None) -> None:
    """The costs of uploads were measured with the whole link."""
    streamer = engine.compute.streamer
    assert streamer is not None
    split: Any = streamer.split
    if link is None or split.costs is None:
        return
    seconds = engine.layout.weight_bytes / (link * 1e9)
    before = split.costs
    loads = {name: max(seconds, getattr(before, name)) for name in ("load", "load_beside")}
    split.costs = dataclasses.replace(before, **loads)
    split._costs.clear()


def trained_stack(args: argparse.Namespace) -> Stack:
    sizes = (TINY if args.smoke else STACKS)[args.work]
    device, dtype = ("cpu", torch.float32) if args.smoke else ("cuda", torch.bfloat16)
    torch.manual_seed(0)
    model = Stack(sizes, device, dtype).train()
    overspill.offload(
        model, device=device, mode="host", slots=2 * sizes.n_experts, quiet=True, progress=False,
        settings=settings(args, residency=False),
    )  # fmt: skip
    follow_link(model.overspill, args.link)
    return model


def steps_of(model: nn.Module, optimizer: overspill.AdamW, tokens: int) -> Callable[[], None]:
    """A step on random rows. Updates of the last one may run beside the next, as in training."""
    weight = next(model.parameters())
    width = model.norm.weight.shape[0]
    x_TD = torch.randn(tokens, width, device=weight.device, dtype=model.norm.weight.dtype)

    def run() -> None:
        model(x_TD).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()

    return run


def on_cpu(engine: Engine, run: Callable[[], None], timeline: Path | None) -> dict[str, str]:
    """The experts that the CPU computes in a step, and how busy each lane is."""
    engine.switch(dataclasses.replace(engine.settings, **dict.fromkeys(SWITCHES, True)))
    run()
    recorder = engine.recorder
    recorder.clear()
    recorder.start()
    run()
    engine.flush()
    recorder.stop()
    spans = recorder.spans()
    if timeline is not None:
        timeline.parent.mkdir(parents=True, exist_ok=True)
        write_perfetto(spans, timeline.with_suffix(".json.gz"))
        draw_timeline(spans, timeline.with_suffix(".png"), timeline.name)
    jobs = [span.name.split(": ")[1] for span in spans if span.row == "cpu compute"]
    number = sum(job.count(",") + 1 for job in jobs)
    first = min((span.start_ns for span in spans), default=0)
    last = max((span.end_ns for span in spans), default=1)
    shares = recorder.busy(first, last)
    recorder.clear()
    busy = " ".join(f"{lane} {share:.0%}" for lane, share in shares.items() if share)
    passes = 2 * engine.n_layers * engine.experts.n_local
    return {"experts on the CPU": f"{number / passes:.0%}", "busy": busy}


def measure_stack(args: argparse.Namespace, until_end: contextlib.ExitStack) -> None:
    model = trained_stack(args)
    engine = model.overspill
    until_end.enter_context(throttled(args.link))  # now: costs were measured with the whole link
    optimizer = overspill.AdamW(model, lr=1e-5, max_grad_norm=args.clip)
    sizes = (TINY if args.smoke else STACKS)[args.work]
    table: list[dict[str, str]] = []
    speeds: list[tuple[Metric, list[float], list[float]]] = []
    for tokens in args.tokens:
        run = steps_of(model, optimizer, tokens)
        for g in args.g:
            source = DrawnRouting.with_imbalance(
                sizes.n_layers, sizes.n_experts, sizes.top_k, g=g, seed=1, zipf=args.zipf,
                repeat=g > 1 / sizes.top_k,
            )  # fmt: skip
            with routed_by(model, source):
                for _ in range(args.warm):
                    run()
                given = args.rounds, args.each, 1, SWITCHES
                on, off = alternate(engine, run, *given)
                name = f"apt-{args.work}-{tokens}"
                timeline = None if args.timeline is None else args.timeline / name
                told = on_cpu(engine, run, timeline)
            found = ratio(on, off)
            rates = [tokens / statistics.median(seconds) for seconds in (on, off)]
            speeds.append((found, *([tokens / s for s in seconds] for seconds in (on, off))))
            table.append({
                "tokens a step": f"{tokens:,}",
                "G": f"{g:.2g}",
                "faster by": f"{found.median:.2f}× ({found.low:.2f}–{found.high:.2f})",
                "tokens/s": f"{rates[0]:,.0f}",
                "without": f"{rates[1]:,.0f}",
                **told,
            })  # fmt: skip
            print(table[-1], flush=True)
    save_stack(args, engine, sizes, speeds, table)
    engine.close()


def save_stack(
    args: argparse.Namespace,
    engine: Engine,
    sizes: Sizes,
    speeds: list[tuple[Metric, list[float], list[float]]],
    table: list[dict[str, str]],
) -> None:
    best, shared, alone = max(speeds, key=lambda found: found[0].median)
    least = min((found for found, _, _ in speeds), key=lambda found: found.median)
    metrics = {
        "speedup": best,
        "least": least,
        "shared": metric(shared, "tokens/s"),
        "gpu_alone": metric(alone, "tokens/s"),
    }
    link = "the whole link" if args.link is None else f"a link of {args.link:g} GB/s"
    config = {
        "row": f"full fine-tuning, {sizes}, {link}, faster by (without CPU experts), best of "
        "these numbers of tokens",
        "show": ["least"],
        "clip": args.clip,
        "rounds": args.rounds,
        "steps of a round": args.each,
        "threads": engine.settings.threads,
    }
    ends = {"stack": "" if args.link is None else f"-{args.link:g}", "many": "-many"}
    name = args.name or f"apt-train{ends[args.work]}"
    if not args.smoke or args.out is not None:
        write_record(name, config, metrics, None, args.out, table)


def measure_w1(args: argparse.Namespace, until_end: contextlib.ExitStack) -> None:
    """W1 with 12 GiB, alternately with and without CPU experts."""
    config, given = get_preset("w1"), {"gpu_memory": "12GiB"}
    work, device = Work(16), "cuda"
    if args.smoke:
        config = dataclasses.replace(
            get_preset("nano"), vocab=64, max_seq=1024, d_model=16, n_heads=2, n_layers=2
        )
        given, work, device = {"mode": "host", "slots": 2 * config.n_experts}, Work(1), "cpu"
    model = build(config, settings(args, residency=not args.smoke), device, **given)
    engine = model.overspill
    follow_link(engine, args.link)
    until_end.enter_context(throttled(args.link))
    stream = steps(model, optimize(model, args.clip), work)

    def run() -> None:
        next(stream)
        synchronize()

    for _ in range(args.warm):
        run()
    on, off = alternate(engine, run, args.rounds, args.each, 1, SWITCHES)
    told = on_cpu(engine, run, None if args.timeline is None else args.timeline / "apt-w1")
    tokens = work.batch * 1024
    metrics = {
        "speedup": ratio(on, off),
        "shared": metric([tokens / s for s in on], "tokens/s"),
        "gpu_alone": metric([tokens / s for s in off], "tokens/s"),
    }
    print(told, flush=True)
    details = {
        "row": "W1, 16×1024 tokens a step, 12 GiB, experts that the CPU trains, faster by",
        "show": ["shared", "gpu_alone"],
        "placement": engine.describe(),
        **told,
    }
    if not args.smoke or args.out is not None:
        write_record(args.name or "apt-w1", details, metrics, None, args.out)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=("stack", "many", "w1"))
    parser.add_argument("--link", type=float, default=None, help="GB/s; default: the whole link")
    parser.add_argument("--tokens", default="512,2048,8192", help="of a step")
    parser.add_argument("--g", default=None, help="default: 0.4, of many experts 0.02 and 0.1")
    parser.add_argument("--zipf", action="store_true", help="popularity by Zipf's law")
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--warm", type=int, default=3, help="steps before the first round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--each", type=int, default=2, help="steps of a round, after one more")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--timeline", type=Path, default=None, help="folder for timelines")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--name", default=None, help="of the record")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.g = [
        float(g) for g in (args.g or ("0.02,0.1" if args.work == "many" else "0.4")).split(",")
    ]
    args.tokens = [int(tokens) for tokens in args.tokens.split(",")]
    if args.smoke:
        args.tokens, args.warm, args.rounds, args.each, args.threads = [24, 32], 1, 1, 1, 1
        args.g = [0.4] if args.work == "stack" else [0.2]
    with contextlib.ExitStack() as until_end:
        (measure_w1 if args.work == "w1" else measure_stack)(args, until_end)


if __name__ == "__main__":
    main()
