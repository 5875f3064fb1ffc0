"""Token rows of the busiest GPU over the mean, with static and with dynamic placement.

Recorded and drawn routing on 4 and 8 GPUs. Costs are those of the reference machine. Both
uploads of a step take as long as 3,900 token rows, whatever the size of the expert: the number of
tokens decides whether dynamic placement pays. Needs no GPU.

PYTHONPATH=src python3 bench/placement.py --routing shared/data/routing
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forecast import measured_rates
from record import metric, write_record

from overspill.core.routing import RoutingSource
from overspill.plan.placement import (
    PlacementCosts,
    balance,
    dynamic_rows,
    layer_seconds,
    static_rows,
)
from overspill.simulate import DrawnRouting, ReplayedRouting
from overspill.simulate.forecast import NodeRates

TRACE = "gptoss20b_decode_experts_only.npz"
COUNTS = "olmoe_mixtral_expert_counts.json"
GPUS = (4, 8)
ROUNDS = 15


@dataclass(frozen=True)
class Case:
    label: str
    expert: int  # parameters of one expert
    source: RoutingSource
    batch: int = 16  # sequences of 1024 tokens on each GPU


def drawn(label: str, n_experts: int, top_k: int, expert: int, g: float, batch: int = 16) -> Case:
    """Zipf shares with `g` times the imbalance of an even routing."""
    source = DrawnRouting.with_imbalance(8, n_experts, top_k, g / n_experts, zipf=True)
    return Case(f"drawn, {label}", expert, source, batch)


def one_hot() -> Case:
    """Eight experts, one with 60% of the tokens; another one in each layer."""
    shares = [0.6, *[0.4 / 7] * 7]
    source = DrawnRouting([shares[i:] + shares[:i] for i in range(8)], top_k=1)
    return Case("drawn, one expert at 60%, top-1", 2 * 1024 * 4096, source)


def cases(folder: Path) -> Iterator[Case]:
    counts = folder / COUNTS
    yield Case("recorded, gpt-oss-20b", 3 * 2880**2, ReplayedRouting.from_npz(folder / TRACE, 32))
    for domain in ("c4", "github", "arxiv"):
        olmoe = DrawnRouting.from_counts(counts, 8, "olmoe", domain)
        yield Case(f"recorded, OLMoE on {domain}", 3 * 2048 * 1024, olmoe)
    mixtral = DrawnRouting.from_counts(counts, 2, "mistral", "github")
    yield Case("recorded, Mixtral on github", 3 * 4096 * 14336, mixtral)
    for batch in (16, 32, 64):  # with few rows for each expert, uploads take longer than compute
        yield drawn("MoE-M, top-1", 64, 1, 2 * 1024 * 4096, 6, batch)
    yield drawn("OLMoE, top-8", 64, 8, 3 * 2048 * 1024, 6)
    yield drawn("Qwen3-30B-A3B, top-8", 128, 8, 3 * 2048 * 768, 6)
    yield drawn("DeepSeek-V3, top-8", 256, 8, 3 * 7168 * 2048, 10)
    for batch in (16, 64):
        yield drawn("Qwen3-Next, top-10", 512, 10, 3 * 2048 * 512, 12, batch)
    yield drawn("Qwen3-Next, top-10, more uneven", 512, 10, 3 * 2048 * 512, 24)
    yield one_hot()


def costs_of(expert: int, rates: NodeRates) -> PlacementCosts:
    """Uploads in two passes, four passes of compute; the first upload waits for the routing."""
    upload = 2 * expert / rates.link
    return PlacementCosts(2 * upload, 8 * expert / rates.compute, wait=upload)


def measure(case: Case, n_gpus: int, rates: NodeRates) -> dict[str, Any]:
    costs = costs_of(case.expert, rates)
    tokens = case.batch * 1024 * n_gpus
    static, dynamic, seconds, shortest, parts, bound, gain = [], [], [], [], [], [], []
    for layer in range(case.source.n_layers):
        ids_TK = case.source(layer, tokens, torch.device("cpu"))
        counts_E = torch.bincount(ids_TK.flatten(), minlength=case.source.n_experts).numpy()
        before_GE = static_rows(counts_E, n_gpus)
        for _ in range(ROUNDS):
            start = time.perf_counter()
            rows_GE = dynamic_rows(counts_E, n_gpus, costs)
            seconds.append(time.perf_counter() - start)
        static.append(balance(before_GE))
        dynamic.append(balance(rows_GE))
        shortest.append(layer_seconds(rows_GE, costs))
        wait = 0.0 if np.array_equal(rows_GE, before_GE) else costs.wait
        gain.append((shortest[-1] + wait) / layer_seconds(before_GE, costs))
        parts.append(int((rows_GE > 0).sum()) - np.count_nonzero(counts_E))
        # of the routing, not of the plan: even uploads take longer than even token rows
        even_uploads = np.count_nonzero(counts_E) * costs.upload
        bound.append(bool(even_uploads > counts_E.sum() * costs.row))
    update = case.source.n_experts * case.expert / rates.cpu_update
    return {
        "case": case,
        "gpus": n_gpus,
        "static": static,
        "dynamic": dynamic,
        "ms": 1e3 * statistics.median(seconds),
        "gpu_ms": 1e3 * statistics.mean(shortest),
        "streamed_ms": 1e3 * max(update, statistics.mean(shortest)),
        "parts": statistics.mean(parts),
        "bound": bound,
        "gain": statistics.mean(gain),
    }


def row(found: dict[str, Any]) -> dict[str, Any]:
    case = found["case"]
    return {
        "routing": case.label,
        "experts": case.source.n_experts,
        "tokens on each GPU": f"{case.batch}×1024",
        "GPUs": found["gpus"],
        "static": _spread(found["static"]),
        "dynamic": _spread(found["dynamic"]),
        "further uploads": f"{found['parts']:.1f}",
        "time over static": f"{found['gain']:.2f}",
        "limit": "uploads" if statistics.mean(found["bound"]) > 0.5 else "compute",
        "plan, ms": f"{found['ms']:.2f}",
        "of GPU time": f"{found['ms'] / found['gpu_ms']:.1%}",
        "of streamed layer": f"{found['ms'] / found['streamed_ms']:.2%}",
    }


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--routing", type=Path, required=True, help="folder of recorded routing")
    parser.add_argument("--out", type=Path, help="folder of the record; default bench/results")
    args = parser.parse_args()
    rates = measured_rates()
    found = [measure(case, n, rates) for case in cases(args.routing) for n in GPUS]
    # layers of 64 or more experts with a static placement of 2.0 or more; whether uploads limit
    many = [
        (after, bound)
        for one in found
        if one["case"].source.n_experts >= 64
        for before, after, bound in zip(one["static"], one["dynamic"], one["bound"], strict=True)
        if before >= 2.0
    ]
    hot = [value for one in found if "60%" in one["case"].label for value in one["dynamic"]]
    write_record(
        "placement-balance",
        {
            "row": "most token rows of a GPU over the mean: mean of the layers (worst layer)",
            "costs": "upload 50 GB/s, compute of scale-moe-l, 8 experts on the GPU",
        },
        {
            "many_experts_uneven": metric([after for after, _ in many], "max/mean"),
            "many_experts_uneven_compute_limits": metric(
                [after for after, bound in many if not bound], "max/mean"
            ),
            "many_experts_uneven_uploads_limit": metric(
                [after for after, bound in many if bound], "max/mean"
            ),
            "many_experts_uneven_within_1.15": metric(
                [100 * statistics.mean(after <= 1.15 for after, _ in many)], "% of layers"
            ),
            "one_expert_60_percent": metric(hot, "max/mean"),
            "plan": metric([one["ms"] for one in found], "ms"),
            "plan_of_gpu_time": metric([100 * one["ms"] / one["gpu_ms"] for one in found], "%"),
            "plan_of_streamed_layer": metric(
                [100 * one["ms"] / one["streamed_ms"] for one in found], "%"
            ),
        },
        None,
        args.out,
        table=[row(one) for one in found],
    )


if __name__ == "__main__":
    main()
