"""Hit rates of a cache of experts: eviction policies on recorded routing, next to the optimum.

A hit is a needed (token, layer, expert) that is in the cache when the token comes. The optimum is
Belady's: of two, the larger, which may leave a needed expert out of the cache. Constants of the
policies were chosen on the first part of the trace in a few layers; the rest is held out.

PYTHONPATH=src python3 bench/serve_cache.py --routing gptoss20b_decode_experts_only.npz
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from eviction import Belady, hit_rates, retained
from record import Metric, metric, write_record

from overspill.plan.eviction import LFU, LRU, Ids, NextUse, Policy

ROOMS = (8, 16)
W2 = (48, 128, 8)  # layers, experts, top-k


class Case(NamedTuple):
    """A policy, and how the cache is used."""

    name: str
    policy: Policy
    optional: bool = False
    shared: bool = False


def cases(trace_TLN: Ids, n_experts: int) -> Iterator[Case]:
    sizes = trace_TLN.shape[1], n_experts
    yield Case("LRU", LRU(*sizes))
    yield Case("LFU, decay 0.97", LFU(*sizes))
    yield Case("NextUse", NextUse(*sizes))
    yield Case("Belady", Belady(n_experts, trace_TLN))
    yield Case("NextUse, insertion optional", NextUse(*sizes), optional=True)
    yield Case("Belady, insertion optional", Belady(n_experts, trace_TLN), optional=True)
    yield Case("LRU, slots shared by all layers", LRU(*sizes), shared=True)
    yield Case("NextUse, slots shared by all layers", NextUse(*sizes), shared=True)
    yield Case("NextUse, shared, insertion optional", NextUse(*sizes), optional=True, shared=True)


def microseconds(n_layers: int, n_experts: int, top_k: int, repeats: int = 300) -> list[float]:
    """Time of a token, divided by the layers: the update of NextUse and the choice of victims."""
    generator = np.random.default_rng(0)
    policy = NextUse(n_layers, n_experts)
    cached = np.zeros((n_layers, n_experts), bool)
    found = []
    for _ in range(repeats):
        experts = generator.random((n_layers, n_experts)).argsort(axis=1)[:, :top_k]
        needed = np.zeros_like(cached)
        np.put_along_axis(needed, experts, True, axis=1)
        start = time.perf_counter()
        policy.use(experts)
        cached = retained(policy.scores_LE, cached, needed, n_experts // 4)
        found.append((time.perf_counter() - start) / n_layers * 1e6)
    return found[repeats // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routing", type=Path, required=True, help=".npz with `experts` [T, L, K]")
    parser.add_argument("--experts", type=int, default=32, help="of a layer")
    parser.add_argument("--layers", default="0,6,12,18,23", help="of the first part")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the first part")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    with np.load(args.routing) as file:
        trace = file["experts"].astype(np.intp)
    if args.tokens >= len(trace):
        parser.error(f"--tokens {args.tokens} leaves none of the {len(trace)} tokens to hold out")
    layers = [int(layer) for layer in args.layers.split(",")]
    first, rest = trace[: args.tokens, layers], trace[args.tokens :]
    parts = {
        f"layers {args.layers}, first {len(first):,} tokens": first,
        f"held out: {rest.shape[1]} layers, last {len(rest):,} tokens": rest,
    }
    table, metrics = [], dict[str, Metric]()
    for prefix, (part, part_trace) in zip(("", "held_out_"), parts.items(), strict=True):
        rates = {
            case.name: hit_rates(
                case.policy, part_trace, ROOMS, optional=case.optional, shared=case.shared
            ).mean(axis=0)
            for case in cases(part_trace, args.experts)
        }
        lowest, best = rates["LRU"], rates["Belady, insertion optional"]
        for name, rate in rates.items():
            closed = 100 * (rate - lowest) / (best - lowest)
            row: dict[str, str] = {"routing": part, "policy": name}
            for room, value, share in zip(ROOMS, rate, closed, strict=True):
                row[f"hits, {room} of {args.experts}"] = f"{value:.4f}"
                row[f"gap closed, {room}"] = f"{share:.0f}%"
                if name == "NextUse":
                    metrics[f"{prefix}closed_{room}"] = metric([share], "% of the gap")
            table.append(row)
            print(" | ".join(row.values()), flush=True)
    metrics["time_w2"] = metric(microseconds(*W2), "µs/layer")
    print(f"{metrics['time_w2'].median:.1f} µs a layer and token for 48 layers of 128 experts")
    config = {
        "row": "Hit rates of eviction policies on the recorded routing of gpt-oss-20b, with room "
        "for 8 and 16 of 32 experts a layer; the gap is that between LRU and Belady's optimum with "
        "optional insertion",
        "layers": layers,
        "tokens": args.tokens,
        "rooms": ROOMS,
    }
    write_record("serve-cache", config, metrics, None, args.out, table)


if __name__ == "__main__":
    main()
