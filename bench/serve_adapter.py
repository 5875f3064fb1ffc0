"""Tokens a second with an adapter of experts beside their weights, and without: random weights.

PYTHONPATH=src python3 bench/serve_adapter.py
PYTHONPATH=src python3 bench/serve_adapter.py --packing mxfp4   # packed experts, no record
PYTHONPATH=src python3 bench/serve_adapter.py --smoke           # tiny, on the CPU
"""

import argparse
import statistics
from contextlib import nullcontext
from typing import Any

import torch
from packed_models import PLAIN, random_model
from record import Limit, Metric, metric, write_record
from serve import HBM, decode, tiny_qwen, token_bytes, w2

import overspill
from overspill.core.garbage import short_collections
from overspill.simulate import DrawnRouting, ReplayedRouting, routed_by
from overspill.tiers.layout import NO_LOW_RANKS, LowRanks

_TRACE = 4096
"""Tokens of the drawn routing."""


class Run:
    """Speeds of a model with some ranks, and bytes that it reads for a token."""

    def __init__(self, args: argparse.Namespace, ranks: LowRanks) -> None:
        self.args = args
        self.rounds, self.tokens = (1, 2) if args.smoke else (args.rounds, args.tokens)
        settings = overspill.Settings(residency=False)
        device, config = ("cpu", tiny_qwen()) if args.smoke else ("cuda", w2())
        given: Any = {"device": device, "settings": settings}
        model = random_model(config, args.packing, ranks, **given)
        engine = model.overspill
        try:
            quarter = engine.n_layers * engine.n_experts // 4
            engine.set_residents([0] * engine.n_layers)
            self.quarter = self._speeds(model, quarter)
            engine.set_residents([engine.n_experts] * engine.n_layers)
            self.all = self._speeds(model, 0)
            self.bytes = sum(token_bytes(model))
            self.placement = engine.describe()
        finally:
            engine.close()
        if device == "cuda":
            torch.cuda.empty_cache()

    def _speeds(self, model: Any, slots: int) -> list[float]:
        """Speeds with some slots for experts in host memory, with the same routing for any
        adapter."""
        drawn = routed_by(model, drawn_routing(model)) if slots else nullcontext()
        with overspill.LLM(model, context=512, max_batch=1, slots=slots) as llm, drawn:
            if slots and not self.args.smoke:
                decode(llm, 1, self.tokens, 2)  # the cache learns
            return [each.speed for each in decode(llm, 1, self.tokens, self.rounds)]


def drawn_routing(model: Any) -> ReplayedRouting:
    """Routing in which the experts of a layer differ in popularity, drawn before it is used."""
    engine = model.overspill
    weights = [1 / (4 + expert) for expert in range(engine.n_experts)]
    shares = [[each / sum(weights) for each in weights]] * engine.n_layers
    drawn = DrawnRouting(shares, model.config.num_experts_per_tok)
    layers = [drawn(layer, _TRACE, torch.device("cpu")) for layer in range(engine.n_layers)]
    return ReplayedRouting(torch.stack(layers, dim=1), engine.n_experts)


def compared(prefix: str, with_it: list[float], without: list[float]) -> dict[str, Metric]:
    plain = statistics.median(without)
    return {
        f"{prefix}tokens_per_second": metric(with_it, "tokens/s"),
        f"{prefix}without": metric(without, "tokens/s"),
        f"{prefix}times": metric([each / plain for each in with_it], "x"),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--packing", default=PLAIN, help="bf16, mxfp4, int4 or fp8")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--out", default=None)
    args = parser.parse_args(arguments)
    with short_collections():
        plain = Run(args, NO_LOW_RANKS)
        adapted = Run(args, LowRanks(args.rank, args.rank))
    metrics = compared("", adapted.all, plain.all)
    metrics |= compared("quarter_", adapted.quarter, plain.quarter)
    for key, value in metrics.items():
        print(f"{key}: {value.median:.3f} {value.unit}", flush=True)
    if args.packing != PLAIN:
        return
    config = {
        "row": f"W2, one request, an adapter of experts of rank {args.rank}, all experts on the "
        "GPU, and a quarter cached",
        "show": [key for key in metrics if key != "tokens_per_second"],
        "tokens": adapted.tokens, "placement": adapted.placement,
    }  # fmt: skip
    limit = Limit(HBM / adapted.bytes, "tokens/s", "reading all weights of a token")
    write_record("serve-adapter", config, metrics, limit, args.out)


if __name__ == "__main__":
    main()
