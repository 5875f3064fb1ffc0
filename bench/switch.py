"""Switch Transformers and NLLB-MoE with random weights, served as in Figures 10 to 16 of the paper
on pre-gated MoE. Each line takes less than 10 minutes on one H200; `--estimate` tells how long.

PYTHONPATH=src python3 bench/switch.py modes
PYTHONPATH=src python3 bench/switch.py active large
PYTHONPATH=src python3 bench/switch.py cache --routing gptoss20b_decode_experts_only.npz
PYTHONPATH=src python3 bench/switch.py large-ssd --disk FOLDER
PYTHONPATH=src python3 bench/switch.py nllb
PYTHONPATH=src python3 bench/switch.py nllb-ssd --disk FOLDER
PYTHONPATH=src python3 bench/pregate_plot.py    # pictures of the records; needs no GPU
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pregate import COPIED, GPU_ONLY, Speed, compare_tokens, flags_of, measure, rows, show
from record import Limit, Metric, metric, write_record
from serve import HBM, HOST, PCIE, ReadTokens, host_bandwidth, read_tokens
from ssd import disk_bandwidth
from switch_models import (
    DEVICE,
    Shape,
    StepRouting,
    build,
    decoder_blocks,
    dense_bytes,
    drawn,
    equation_1,
    in_turn,
    recorded,
    repeats,
    token_bytes,
)

import overspill
from overspill.core.garbage import short_collections
from overspill.core.sizes import format_size
from overspill.hardware.machine import available_memory
from overspill.simulate import routed_by

PRE_GATED = "pre-gated"
MODES = (GPU_ONLY, "on-demand", "prefetch-all", COPIED, PRE_GATED)
OFFLOADED = MODES[1:]
COPIED_FROM_HOST = ("on-demand", COPIED, PRE_GATED)
FROM_DISK = ("on-demand", PRE_GATED)
ALL_FROM_DISK = (*FROM_DISK, "prefetch-all")
ACTIVE = (1, 4, 16, 64)
CACHED = (1, 5, 10, 20)
LARGE_MEMORY = 16 << 30
_HOST_SHARE = 0.9
"""Share of the free host memory, or disk, for experts."""
_BANDWIDTH_BYTES = 4 << 30
"""Read to measure the disk."""
_FROM_DISK, _FEW = 24, 2
"""Tokens of a round with experts on disk, and of one that reads them all for each token."""
_IN_A_ROW = 2
"""How often an LLM measures its mode; to open it takes longer."""
_EVEN = "every expert is as likely as any other"
ACTIVE_WEIGHTS = (
    "4.5 TB/s, measured with own kernels, divided by the weights of a token: the decoder without "
    "keys and values of the source, the head, and one expert in each MoE block"
)


class Bench(NamedTuple):
    """Options of a run."""

    rounds: int
    tokens: int
    smoke: bool
    out: Path | None
    routing: Path | None
    disk: Path | None
    sizes: Sequence[int]
    blocks: int
    """Most blocks of each stack, for models that may be smaller."""

    def shape(self, preset: str) -> Shape:
        return Shape(preset, tiny=self.smoke)

    def host_bandwidth(self) -> float:
        return 1e10 if self.smoke else host_bandwidth()

    def disk_bandwidth(self, shape: Shape) -> float:
        """Before a model is there: the file would be beside its experts."""
        assert self.disk is not None
        count = 16 if self.smoke else max(16, _BANDWIDTH_BYTES // shape.expert_bytes)
        aligned = -(-shape.expert_bytes // 4096) * 4096
        return disk_bandwidth(self.disk, aligned, count)["read"]

    def few(self, mode: str) -> int:
        """Tokens of a round."""
        return min(self.tokens, 8) if mode == "prefetch-all" else self.tokens

    def interleave(self, model: Any, modes: Sequence[str], **options: Any) -> dict[str, Speed]:
        """Measure each mode in each round, so that changes of the machine affect all modes
        alike."""
        found: dict[str, Speed] = {}
        in_a_row = 1 if self.smoke else _IN_A_ROW
        for _ in range(self.rounds):
            for mode in modes:
                each = measure(model, mode, in_a_row, self.few(mode), **options)
                found[mode] = _join(found.get(mode), each)
        for mode, each in found.items():
            show(mode, each)
            if DEVICE == "cuda" and mode != GPU_ONLY and not any(each.missing):
                print(f"  {mode}: no expert was missing, or no graph computed the steps")
        return found


def _join(before: Speed | None, each: Speed) -> Speed:
    if before is None:
        return each
    peak, missing = max(before.peak, each.peak), before.missing + each.missing
    return Speed(before.tokens + each.tokens, peak, each.token_ids, missing)


def over(found: dict[str, Speed], own: str) -> dict[str, Metric]:
    """How much faster a mode is than each of the others, round by round."""
    return {
        f"{_key(own)}_over_{_key(mode)}": metric(
            [a / b for a, b in zip(found[own].tokens, each.tokens, strict=True)], "times"
        )
        for mode, each in found.items()
        if mode in ("on-demand", "prefetch-all")
    }


def _key(mode: str) -> str:
    return mode.replace(", ", "_").replace("-", "_")


def host_limit(bench: Bench, model: Any, shape: Shape) -> Limit:
    nbytes = token_bytes(model, shape.top_k).experts
    return Limit(bench.host_bandwidth() / nbytes, "tokens/s", HOST)


def share(speeds: Sequence[float], most: float) -> Metric:
    return metric([100 * speed / most for speed in speeds], "%")


def memory(found: dict[str, Speed], model: Any, shape: Shape) -> dict[str, Metric]:
    """Peak memory of the parameters against equation 1: without what gpu-only needs beside its
    parameters, which is keys and values, activations and slots for prompts."""
    engine = model.overspill
    everything = dense_bytes(model) + shape.n_experts * engine.layout.weight_bytes
    beside = found[GPU_ONLY].peak - everything
    most = equation_1(model, shape.top_k)
    made = {"equation_1": metric([most / 2**20], "MiB")}
    for mode in (COPIED, PRE_GATED):
        made[f"{_key(mode)}_beyond_equation_1"] = metric(
            [100 * ((found[mode].peak - beside) / most - 1)], "%"
        )
    return made


def run_modes(bench: Bench) -> list[Path]:
    """Figures 10 to 12."""
    return [_compare_modes(bench, size) for size in bench.sizes]


def _compare_modes(bench: Bench, size: int) -> Path:
    shape = bench.shape(f"switch-base-{size}")
    print(f" {shape}", flush=True)
    model = build(shape)
    found = bench.interleave(model, MODES)
    blocks, read = decoder_blocks(model), token_bytes(model, shape.top_k)
    limit = Limit(HBM / (read.dense + read.experts), "tokens/s", ACTIVE_WEIGHTS)
    host = host_limit(bench, model, shape).value
    metrics = {
        "gpu_only": metric(found[GPU_ONLY].tokens, "tokens/s"),
        "pre_gated": metric(found[PRE_GATED].tokens, "tokens/s"),
        "pre_gated_copied": metric(found[COPIED].tokens, "tokens/s"),
        **over(found, PRE_GATED),
        **over(found, COPIED),
        "pre_gated_of_gpu_only": _of(found, PRE_GATED),
        "pre_gated_copied_of_gpu_only": _of(found, COPIED),
        "pre_gated_of_host_memory": share(found[PRE_GATED].tokens, host),
        "block": metric([1e3 / each / blocks for each in found[PRE_GATED].tokens], "ms"),
        **memory(found, model, shape),
    }
    details = {
        "row": f"{shape}, one request, nothing cached; a step divided by its {blocks} MoE "
        "blocks is the time of a block",
        "compare": "paper: 0.81 of gpu-only, 1.5 times on-demand, 27 times prefetch-all",
        "show": [name for name in metrics if name != "gpu_only"],
        "tokens": bench.tokens,
        "repeated experts": f"{100 * repeats(model):.0f}% of tokens",
        "other tokens than gpu-only": compare_tokens(found),
    }
    table = rows(found, blocks, model=shape.short)
    model.overspill.close()
    name = f"switch-modes-{size}"
    return write_record(name, details, metrics, limit, bench.out, table)


def _of(found: dict[str, Speed], mode: str) -> Metric:
    every = zip(found[mode].tokens, found[GPU_ONLY].tokens, strict=True)
    return metric([100 * own / gpu for own, gpu in every], "%")


def run_active(bench: Bench) -> list[Path]:
    """Figure 14: requests whose tokens all need other experts make so many active in a block."""
    shape = bench.shape("switch-base-64")
    model = build(shape)
    blocks = decoder_blocks(model)
    counts = ACTIVE[:2] if bench.smoke else ACTIVE
    table: list[dict[str, Any]] = []
    metrics: dict[str, Metric] = {}
    for count in counts:
        print(f" {count} active experts", flush=True)
        few = bench._replace(tokens=min(bench.tokens, max(8, bench.tokens // count)))
        found = few.interleave(model, MODES, routing=lambda: in_turn(model), size=count)
        table += rows(found, blocks, active=count)
        own = [1e3 / each / blocks for each in found[PRE_GATED].tokens]
        metrics[f"block_of_{count}"] = metric(own, "ms")
    model.overspill.close()
    details = {"row": f"{shape}, time of an MoE block by its active experts", "show": []}
    return [write_record("switch-active", details, metrics, None, bench.out, table)]


def run_cache(bench: Bench) -> list[Path]:
    """Figure 15."""
    shape = bench.shape("switch-large-128")
    model = build(shape)
    blocks, top_k = decoder_blocks(model), shape.top_k
    total = blocks * model.overspill.n_experts
    path = bench.routing
    words = "drawn by Zipf's law" if path is None else "of gpt-oss"

    def routing() -> StepRouting:
        return drawn(model, top_k, 1.0) if path is None else recorded(path, model, top_k)

    parts = CACHED[-1:] if bench.smoke else CACHED
    cases = [("none", 0), *((name, part) for name in ("LRU", "LFU") for part in parts)]
    table: list[dict[str, Any]] = []
    metrics: dict[str, Metric] = {}
    for name, percent in cases:
        print(f" {name}, {percent}%", flush=True)
        policy = "lru" if name == "LRU" else "lfu"
        slots = -(-percent * total // 100)
        found = bench.interleave(
            model, COPIED_FROM_HOST, routing=routing, slots=slots, policy=policy
        )
        made = rows(found, blocks, policy=name, cached=f"{percent}%")
        for row, each in zip(made, found.values(), strict=True):
            row["missing experts a token"] = round(statistics.median(each.missing), 2)
        table += made
        metrics[f"{name.lower()}_{percent}"] = metric(found[PRE_GATED].tokens, "tokens/s")
    model.overspill.close()
    details = {
        "row": f"{shape}, one request, by the share of the decoder's experts that is cached, "
        f"routing {words}",
        "compare": "paper: Switch-Large-128, LRU, 1 to 20%",
        "tokens": bench.tokens,
    }
    return [write_record("switch-cache", details, metrics, None, bench.out, table)]


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Within it, torch allocates no more GPU memory."""
    if DEVICE != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        nbytes / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def run_large(bench: Bench) -> list[Path]:
    """Figures 10 to 12 for a model beyond the memory of a small GPU."""
    with limited(LARGE_MEMORY):
        return _run_from_host(
            bench, "switch-large", bench.shape("switch-large-128"), OFFLOADED,
            "paper: 1.6 times on-demand, 52 times prefetch-all",
        )  # fmt: skip


def run_nllb(bench: Bench) -> list[Path]:
    shape = within_memory(bench.shape("nllb-moe-54b"), bench.blocks)
    return _run_from_host(bench, "serve-nllb", shape, COPIED_FROM_HOST)


def _run_from_host(
    bench: Bench, name: str, shape: Shape, modes: Sequence[str], compare: str = ""
) -> list[Path]:
    """All experts in host memory, GPU memory limited, and nothing cached."""
    print(f" {shape}", flush=True)
    given = {} if bench.smoke else {"gpu_memory": LARGE_MEMORY}
    model = build(shape, **given)
    limit = host_limit(bench, model, shape)
    found = bench.interleave(model, modes)
    blocks, read = decoder_blocks(model), token_bytes(model, shape.top_k)
    most = PCIE / read.experts
    own = found[PRE_GATED].tokens
    metrics = {
        "pre_gated": metric(own, "tokens/s"),
        "pre_gated_copied": metric(found[COPIED].tokens, "tokens/s"),
        "pre_gated_copied_of_pcie": share(found[COPIED].tokens, most),
        **over(found, PRE_GATED),
        **over(found, COPIED),
        "host_read": metric([each * read.experts / 1e9 for each in own], "GB/s"),
        "gpu_memory": metric([max(each.peak for each in found.values()) / 2**30], "GiB"),
    }
    details = {
        "row": f"{shape}, {_budget(bench)}one request, experts in host memory, nothing cached",
        "compare": compare,
        "show": [key for key in metrics if key != "pre_gated"],
        "tokens": bench.tokens,
        "placement": model.overspill.describe(),
        "repeated experts": f"{100 * repeats(model):.0f}% of tokens",
        "other tokens than the first mode": compare_tokens(found),
    }
    table = rows(found, blocks, model=shape.short)
    model.overspill.close()
    return [write_record(name, details, metrics, limit, bench.out, table)]


def _budget(bench: Bench) -> str:
    return "" if bench.smoke else f"{format_size(LARGE_MEMORY)} of GPU memory, "


def within_memory(shape: Shape, blocks: int) -> Shape:
    """The shape with as many blocks as fit into host memory."""
    return shape.within(_HOST_SHARE * available_memory(), blocks)


def within_disk(shape: Shape, folder: Path, blocks: int) -> Shape:
    """The shape with as many blocks as fit on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    return shape.within(_HOST_SHARE * shutil.disk_usage(folder).free, blocks)


def run_large_ssd(bench: Bench) -> list[Path]:
    """Figure 16."""
    shape = bench.shape("switch-large-128")
    return _run_from_disk(bench, "switch-large-ssd", shape, ALL_FROM_DISK)


def run_nllb_ssd(bench: Bench) -> list[Path]:
    return _run_from_disk(bench, "serve-nllb-ssd", bench.shape("nllb-moe-54b"), FROM_DISK)


def _run_from_disk(bench: Bench, name: str, shape: Shape, modes: tuple[str, ...]) -> list[Path]:
    """All experts on disk, with room in host memory for a quarter of the decoder's."""
    assert bench.disk is not None
    shape = within_disk(shape, bench.disk, bench.blocks)
    print(f" {shape}", flush=True)
    bandwidth = bench.disk_bandwidth(shape)
    slots = max(4, shape.n_experts // 8)
    model = build(shape, disk=bench.disk, mode="disk", host_slots=slots)
    found: dict[str, list[ReadTokens]] = {mode: [] for mode in modes}
    for number, mode in enumerate(modes * bench.rounds):
        found[mode].append(_read(bench, model, mode, shape, number))
    blocks, own = decoder_blocks(model), found[PRE_GATED]
    speeds = [each.speed * each.nbytes for each in own]
    metrics = {
        "pre_gated": metric([each.speed for each in own], "tokens/s"),
        "share": share(speeds, bandwidth),
        "disk_read": metric([speed / 1e9 for speed in speeds], "GB/s"),
        "disk_bandwidth": metric([bandwidth / 1e9], "GB/s"),
        **{
            f"pre_gated_over_{_key(mode)}": metric(
                [a.speed / b.speed for a, b in zip(own, each, strict=True)], "times"
            )
            for mode, each in found.items()
            if mode != PRE_GATED
        },
    }
    details = {
        "row": f"{shape}, one request, experts on disk, room for {slots} of {shape.n_experts} in "
        f"host memory; {_EVEN}",
        "show": [key for key in metrics if key != "pre_gated"],
        "tokens": bench.tokens,
        "placement": model.overspill.describe(),
    }
    table = [
        {
            "model": shape.short,
            "mode": mode,
            "tokens/s": round(statistics.median(read.speed for read in each), 2),
            "ms a block": round(1e3 / statistics.median(read.speed for read in each) / blocks, 1),
            "GB a token from disk": round(statistics.median(read.nbytes for read in each) / 1e9, 3),
        }
        for mode, each in found.items()
    ]
    model.overspill.close()
    nbytes = statistics.median(each.nbytes for each in own)
    limit = None
    if nbytes:
        limit = Limit(bandwidth / nbytes, "tokens/s", "reading missing experts from disk")
    return [write_record(name, details, metrics, limit, bench.out, table)]


def _read(bench: Bench, model: Any, mode: str, shape: Shape, number: int) -> ReadTokens:
    """Each measurement has other experts: those of the one before are in host memory."""
    source = drawn(model, shape.top_k, 0.0, number)
    tokens = min(bench.tokens, _FEW if mode == "prefetch-all" else _FROM_DISK)
    with (
        overspill.LLM(model, context=512, max_batch=1, slots=0, **flags_of(mode)) as llm,
        short_collections(),
        routed_by(model, source),
    ):
        read_tokens(llm, number, 2)  # compiles kernels, and fills host memory
        print(f"  {mode}: ", end="")
        return read_tokens(llm, number, tokens)


class Plan(NamedTuple):
    """Work of a part: models and measurements."""

    run: Callable[[Bench], list[Path]]
    presets: Sequence[str]
    modes: Sequence[str]
    repeats: int = 1
    """How often each mode is measured in a round."""
    rounds: int = 3
    tokens: int = 200
    """Most rounds, and tokens of each: a part takes less than 10 minutes."""
    passes: int = 2
    """How often a mode computes the tokens: the first time it compiles kernels."""
    on_disk: bool = False
    shrinks: bool = False
    """Has as many blocks as fit into host memory."""
    gpu_memory: int | None = None


LARGE, NLLB = ("switch-large-128",), ("nllb-moe-54b",)
PLANS = {
    "modes": Plan(run_modes, (), MODES),
    "active": Plan(run_active, ("switch-base-64",), MODES, len(ACTIVE), rounds=2),
    "cache": Plan(
        run_cache, LARGE, COPIED_FROM_HOST, 1 + 2 * len(CACHED), rounds=2, tokens=60, passes=5
    ),
    "large": Plan(run_large, LARGE, OFFLOADED, gpu_memory=LARGE_MEMORY),
    "large-ssd": Plan(run_large_ssd, LARGE, ALL_FROM_DISK, on_disk=True),
    "nllb": Plan(run_nllb, NLLB, COPIED_FROM_HOST, shrinks=True, gpu_memory=LARGE_MEMORY),
    "nllb-ssd": Plan(run_nllb_ssd, NLLB, FROM_DISK, on_disk=True),
}
_PIN, _FILL, _WRITE, _READ_DISK = 1.6 * 2**30, 8e9, 2e9, 2.9e9  # bytes a second
_DRAW = 1.8e8
"""Bytes a second of dense weights that transformers draws, on one core."""
_START, _OPEN, _STEP = 60.0, 6.0, 2e-3
"""Seconds until all kernels are compiled, to open an LLM and capture its graphs, and of a step
beside copies of experts."""


class Need(NamedTuple):
    """Bytes and seconds of a part."""

    host: int
    disk: int
    gpu: int
    seconds: float


def estimate(plan: Plan, shape: Shape, bench: Bench) -> Need:
    """Seconds and bytes of a plan for one of its shapes on the reference machine."""
    total = shape.n_experts * shape.expert_bytes
    each_block = shape.n_experts // (2 * shape.blocks)
    host = total // 8 if plan.on_disk else total
    seconds = host / _PIN + total / (_WRITE if plan.on_disk else _FILL)
    seconds += shape.dense_bytes / _DRAW
    gpu = shape.dense_bytes + 4 * shape.expert_bytes
    for mode in plan.modes:
        every = mode == "prefetch-all"
        count, moved = each_block if every else shape.top_k, 0.0
        if every and not plan.on_disk:
            gpu = max(gpu, shape.dense_bytes + 3 * count * shape.expert_bytes)
        if mode == GPU_ONLY:
            gpu = max(gpu, shape.dense_bytes + total)
            count, moved = 0, 2 * total / PCIE
        tokens = plan.passes * bench.few(mode)
        if plan.on_disk:
            tokens = 2 + min(bench.tokens, _FEW if every else _FROM_DISK)
        rate = _READ_DISK if plan.on_disk else PCIE
        step = _STEP + shape.blocks * count * shape.expert_bytes / rate
        seconds += bench.rounds * plan.repeats * (_OPEN + tokens * step + moved)
    return Need(host, total if plan.on_disk else 0, plan.gpu_memory or gpu, seconds)


def print_estimates(part: str, bench: Bench) -> None:
    plan, seconds = PLANS[part], _START
    for preset in plan.presets or [f"switch-base-{size}" for size in bench.sizes]:
        shape = bench.shape(preset)
        if plan.on_disk:
            assert bench.disk is not None
            shape = within_disk(shape, bench.disk, bench.blocks)
        elif plan.shrinks:
            shape = within_memory(shape, bench.blocks)
        need = estimate(plan, shape, bench)
        host, disk, gpu = (format_size(each) for each in need[:3])
        print(
            f"{part}: {shape}: {host} of host memory, {disk} on disk, {gpu} of GPU memory, "
            f"{need.seconds:.0f} s"
        )
        seconds += need.seconds
    print(f"{part}: {seconds:.0f} s in all, with {_START:.0f} s for kernels")


def print_record(path: Path) -> None:
    record = json.loads(path.read_text())
    print(f"\n{record['name']}: {record['config']['row']}")
    for number, (name, each) in enumerate(record["metrics"].items()):
        text = f"  {name:32s} {each['median']:12,.4g} {each['unit']}"
        text += f" ({each['low']:,.4g}–{each['high']:,.4g})"
        if number == 0 and record["limit"] is not None:
            text += f", {each['median'] / record['limit']['value']:.0%} of the limit"
        print(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*PLANS])
    parser.add_argument("--tokens", type=int, default=200, help="of a round, at most")
    parser.add_argument("--rounds", type=int, default=3, help="at most")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=(64, 128, 256), help="experts of modes' models"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=64,
        help="with experts in each stack of nllb (of 6) and the parts on disk (of 12), at most",
    )
    parser.add_argument("--routing", type=Path, help="recorded routing of gpt-oss, for cache")
    parser.add_argument("--disk", type=Path, help="folder for experts, for large-ssd and nllb-ssd")
    parser.add_argument("--out", type=Path, help="folder of the records")
    parser.add_argument("--estimate", action="store_true", help="print bytes and seconds only")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU; needs --out")
    args = parser.parse_args(arguments)
    from_disk = [part for part in args.parts if PLANS[part].on_disk]
    if from_disk and args.disk is None:
        parser.error(f"{', '.join(from_disk)} needs --disk FOLDER, on a local SSD")
    if args.smoke and args.out is None:
        parser.error("--smoke needs --out FOLDER: its records are not for bench/results")
    written: list[Path] = []
    for part in args.parts:
        plan = PLANS[part]
        rounds, tokens = min(args.rounds, plan.rounds), min(args.tokens, plan.tokens)
        bench = Bench(
            1 if args.smoke else rounds, 2 if args.smoke else tokens, args.smoke, args.out,
            args.routing, args.disk, args.sizes, args.blocks,
        )  # fmt: skip
        if args.estimate:
            print_estimates(part, bench)
            continue
        print(part, flush=True)
        written += plan.run(bench)
    for path in written:
        print_record(path)


if __name__ == "__main__":
    main()
