"""Tokens a second of a model of gpt-oss-120b's shape (36 layers, 128 experts, top-4, MXFP4) with
random weights, made without a checkpoint: experts in host memory, and fewer layers on disk.

PYTHONPATH=src python3 bench/serve_gpt_oss.py host --routing gptoss20b_decode_experts_only.npz
PYTHONPATH=src python3 bench/serve_gpt_oss.py disk --disk FOLDER --routing FILE
PYTHONPATH=src python3 bench/serve_gpt_oss.py host disk --smoke --disk FOLDER --routing FILE  # tiny
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpt_oss import gpt_oss
from packed_models import WIDE_ROUTING, random_model, wide_routing
from record import Limit, Metric, metric, write_record
from serve import HBM, SUM, decode, host_bandwidth, read_tokens, token_bytes
from serve_packed import gpu_memory
from ssd import disk_bandwidth

import overspill
from overspill.core.garbage import short_collections
from overspill.simulate import ReplayedRouting, routed_by

GPU = 24
"""GiB of GPU memory."""
ON_DISK = 12
"""Layers whose experts are on disk, at most."""
_RECORD = 13_236_480
"""Bytes of an expert."""
_LEARN = 600
"""Tokens until the cache holds the experts that are used most."""
_BANDWIDTH_BYTES = 4 << 30


@contextmanager
def open_model(layers: int, smoke: bool, **given: Any) -> Iterator[Any]:
    start = time.perf_counter()
    device = "cpu" if smoke else "cuda"
    model = random_model(gpt_oss(layers, smoke), "mxfp4", device=device, **given)
    print(f"made in {time.perf_counter() - start:.0f} s: {model.overspill.describe()}", flush=True)
    try:
        yield model
    finally:
        model.overspill.close()


def one_set(n_layers: int, n_experts: int, top_k: int) -> ReplayedRouting:
    """Every token has the first experts of each layer: soon none of them is missing."""
    return ReplayedRouting(torch.arange(top_k).expand(64, n_layers, top_k), n_experts)


def run_host(args: argparse.Namespace) -> None:
    """All experts in host memory, one request; the GPU keeps copies of as many as fit."""
    smoke = args.smoke
    tokens, rounds, learn = (2, 1, 2) if smoke else (args.tokens, args.rounds, _LEARN)
    bandwidth = 1e10 if smoke else host_bandwidth()
    given = {} if smoke else {"gpu_memory": f"{GPU}GiB"}
    settings = overspill.Settings(residency=False)  # the cache has the memory
    with gpu_memory(GPU), open_model(36, smoke, settings=settings, **given) as model:
        engine, top_k = model.overspill, model.config.num_experts_per_tok
        sizes = engine.n_layers, engine.n_experts, top_k
        recorded = wide_routing(args.routing, *sizes)
        with overspill.LLM(model, context=512, max_batch=1) as llm, short_collections():
            with routed_by(model, one_set(*sizes)):
                decode(llm, 1, tokens, 1)
                alone = decode(llm, 1, tokens, rounds)
            with routed_by(model, recorded):
                decode(llm, 1, learn, 1)
                found = decode(llm, 1, tokens, rounds)
            stats = llm.stats()
        print(f"one set: {alone}\nsynthesized: {found}", flush=True)
        size, uses = engine.layout.weight_bytes, engine.n_layers * top_k
        step = 1 / statistics.median(each.speed for each in alone)
        most = [1 / (step + each.missing * size / bandwidth) for each in found]
        shares = [100 * each.speed / limit for each, limit in zip(found, most, strict=True)]
        metrics = {
            "tokens_per_second": metric([each.speed for each in found], "tokens/s"),
            "share": metric(shares, "%"),
            "hit_rate": metric([100 * (1 - each.missing / uses) for each in found], "%"),
            "missing_experts": metric([each.missing for each in found], "of a step"),
            "host_read": metric([each.speed * each.missing * size / 1e9 for each in found], "GB/s"),
            "host_bandwidth": metric([bandwidth / 1e9], "GB/s"),
            "nothing_missing": metric([each.speed for each in alone], "tokens/s"),
            "nothing_missing_share": metric(
                [100 * each.speed * sum(token_bytes(model)) / HBM for each in alone], "%"
            ),
            "cached": metric([stats.get("expert_slots", 0)], f"of {uses // top_k * sizes[1]}"),
        }
        limit = Limit(statistics.median(most), "tokens/s", f"{SUM}; measured with one set of them")
        row = f"gpt-oss-120b's shape, MXFP4, {GPU} GiB of GPU memory, one request, experts in "
        row += "host memory, synthesized routing"
        write("serve-gpt-oss-120b", row, metrics, limit, model, args, tokens)


def run_disk(args: argparse.Namespace) -> None:
    """Experts on disk, with room in host memory for a quarter, and none cached on the GPU."""
    smoke, n_layers = args.smoke, ON_DISK
    args.disk.mkdir(parents=True, exist_ok=True)
    if not smoke:
        free = 0.9 * shutil.disk_usage(args.disk).free
        n_layers = min(ON_DISK, int(free // (128 * _RECORD)))
    record = 4096 * 4 if smoke else -(-_RECORD // 4096) * 4096
    count = 16 if smoke else _BANDWIDTH_BYTES // record
    before = disk_bandwidth(args.disk, record, count)["read"]
    slots = 4 if smoke else n_layers * 128 // 4
    given: dict[str, Any] = {"disk": args.disk, "mode": "disk", "host_slots": slots}
    given |= {} if smoke else {"gpu_memory": f"{GPU}GiB"}
    settings = overspill.Settings(residency=False)
    with gpu_memory(GPU), open_model(n_layers, smoke, settings=settings, **given) as model:
        engine, top_k = model.overspill, model.config.num_experts_per_tok
        routing = wide_routing(args.routing, engine.n_layers, engine.n_experts, top_k)
        tokens, rounds = (2, 1) if smoke else (args.tokens_on_disk, args.rounds)
        with (
            overspill.LLM(model, context=512, max_batch=1, slots=0) as llm,
            short_collections(),
            routed_by(model, routing),
        ):
            read_tokens(llm, 0, tokens)  # fills host memory
            found = [read_tokens(llm, 1 + number, tokens) for number in range(rounds)]
        placement = engine.describe()
        after = disk_bandwidth(args.disk, record, count)["read"]
        bandwidth = (before + after) / 2
        speeds = [each.speed * each.nbytes for each in found]
        needed = token_bytes(model)[1]
        metrics = {
            "tokens_per_second": metric([each.speed for each in found], "tokens/s"),
            "share": metric([100 * speed / bandwidth for speed in speeds], "%"),
            "hit_rate": metric([100 * (1 - each.nbytes / needed) for each in found], "%"),
            "disk_read": metric([speed / 1e9 for speed in speeds], "GB/s"),
            "disk_bandwidth": metric([before / 1e9, after / 1e9], "GB/s"),
            "needed": metric([needed / 1e9], "GB a token"),
        }
        most = bandwidth / max(1.0, statistics.median(each.nbytes for each in found))
        limit = Limit(most, "tokens/s", "reading missing experts from disk")
        row = f"gpt-oss-120b's shape with {engine.n_layers} of 36 layers, MXFP4, one request, "
        row += f"experts on disk, room for {slots} of {engine.n_layers * engine.n_experts} in host "
        row += "memory, none cached on the GPU, synthesized routing"
        details = metrics, limit, model, args, tokens, placement
        write("serve-gpt-oss-120b-ssd", row, *details)


def write(
    name: str, row: str, metrics: dict[str, Metric], limit: Limit, model: Any,
    args: argparse.Namespace, tokens: int, placement: str | None = None,
) -> None:  # fmt: skip
    headline = next(iter(metrics))
    config = {
        "row": row, "show": [key for key in metrics if key != headline], "tokens": tokens,
        "placement": placement or model.overspill.describe(), "routing": WIDE_ROUTING,
    }  # fmt: skip
    write_record(name, config, metrics, limit, args.out)


PARTS = {"host": run_host, "disk": run_disk}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=list(PARTS))
    parser.add_argument("--routing", type=Path, required=True, help="recorded routing of gpt-oss")
    parser.add_argument("--disk", type=Path, help="folder for experts, for disk")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--tokens-on-disk", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; needs --out")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(arguments)
    if "disk" in args.names and args.disk is None:
        parser.error("disk needs --disk FOLDER, on a local SSD")
    if args.smoke and args.out is None:
        parser.error("--smoke needs --out FOLDER: its records are not for bench/results")
    for name in args.names:
        PARTS[name](args)


if __name__ == "__main__":
    main()
