"""Tokens a second of one request, with experts on the GPU and in host memory.

PYTHONPATH=src python3 bench/serve.py w2-gpu w2-none w2-prefill w2-quarter-random
PYTHONPATH=src python3 bench/serve.py w2-quarter --routing gptoss20b_decode_experts_only.npz
PYTHONPATH=src python3 bench/serve.py mixtral-6
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from record import Limit, Metric, metric, write_record
from transformers import MixtralConfig, Qwen3MoeConfig

import overspill
from overspill.compute.cpu_kernel import read_bandwidth
from overspill.core.garbage import short_collections
from overspill.hardware.machine import usable_cores
from overspill.simulate import ReplayedRouting, routed_by

HBM = 4.5e12
"""Bytes a second that kernels of our own have read on an H200."""
PCIE = 55e9
PROMPT = 512
_READ = 4 << 30
SLOTS = {"w2-gpu": 0, "w2-none": 0, "w2-prefill": 0, "w2-quarter-random": 384, "w2-quarter": 384}
"""GPU slots that copies of experts may have."""


def w2() -> Any:
    """Qwen3-30B-A3B, cut to 12 of 48 layers."""
    return Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=12, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, rope_theta=1e6,
        max_position_embeddings=40_960, tie_word_embeddings=False,
    )  # fmt: skip


def mixtral() -> Any:
    """Mixtral-8x7B, cut to 6 of 32 layers."""
    return MixtralConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=6,
        num_attention_heads=32, num_key_value_heads=8, num_local_experts=8,
        num_experts_per_tok=2, max_position_embeddings=32_768, tie_word_embeddings=False,
    )  # fmt: skip


def host_bandwidth() -> float:
    """Bytes a second that all cores read from host memory."""
    return read_bandwidth(torch.ones(_READ, dtype=torch.uint8), usable_cores())


def decode(llm: overspill.LLM, tokens: int, rounds: int) -> list[float]:
    """Tokens a second after the first one, of one request at temperature 1."""
    found = []
    for seed in range(rounds + 1):
        params = overspill.SamplingParams(
            max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True
        )
        times = [time.perf_counter() for _ in llm.stream([1, 2, 3, 4, 5, 6, 7, 8], params)]
        found.append((len(times) - 1) / (times[-1] - times[0]))
    return found[1:]  # the first one compiles kernels


def prefill(llm: overspill.LLM, rounds: int) -> list[float]:
    """Tokens a second of a long prompt, until its first token."""
    generator = torch.Generator().manual_seed(0)
    params, found = overspill.SamplingParams(max_tokens=1, ignore_eos=True), []
    for _ in range(rounds + 2):
        prompt = torch.randint(100, 30_000, (PROMPT,), generator=generator).tolist()
        start = time.perf_counter()
        llm.generate([prompt], params)
        found.append(PROMPT / (time.perf_counter() - start))
    return found[2:]


def token_bytes(model: Any) -> tuple[int, int]:
    """Bytes that a token reads: of dense weights, and of experts."""
    engine = model.overspill
    dense = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    top_k = model.config.num_experts_per_tok
    return dense, engine.n_layers * top_k * engine.layout.weight_bytes


class Halves:
    """Recorded routing of a model with half as many experts for each token, for twice as many
    layers: a layer has the experts of two."""

    def __init__(self, trace: ReplayedRouting, n_layers: int, n_experts: int) -> None:
        self._trace = trace
        self.n_layers, self.n_experts, self.top_k = n_layers, n_experts, 2 * trace.top_k
        assert trace.n_layers >= 2 * n_layers
        assert n_experts >= 2 * trace.n_experts

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> torch.Tensor:
        first, second = (self._trace(2 * layer + half, n_tokens, device) for half in range(2))
        return torch.cat((first, second + self._trace.n_experts), dim=1)


class Even:
    """Every token has the next experts in turn: a prompt needs them all."""

    def __init__(self, n_layers: int, n_experts: int, top_k: int) -> None:
        self.n_layers, self.n_experts, self.top_k = n_layers, n_experts, top_k

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> torch.Tensor:
        ids = torch.arange(n_tokens * self.top_k, device=device) % self.n_experts
        return ids.view(n_tokens, self.top_k)


def measure(name: str, llm: overspill.LLM, args: argparse.Namespace) -> list[float]:
    engine, top_k = llm.model.overspill, llm.model.config.num_experts_per_tok
    if name == "w2-prefill":
        with routed_by(llm.model, Even(engine.n_layers, engine.n_experts, top_k)):
            return prefill(llm, args.rounds)
    if name == "w2-quarter":
        trace = ReplayedRouting.from_npz(args.routing)
        with routed_by(llm.model, Halves(trace, engine.n_layers, engine.n_experts)):
            decode(llm, args.tokens, 2)  # the cache learns
            return decode(llm, args.tokens, args.rounds)
    return decode(llm, args.tokens, args.rounds)


def run(name: str, llm: overspill.LLM, args: argparse.Namespace, bandwidth: float) -> None:
    model = llm.model
    engine = model.overspill
    dense, experts = token_bytes(model)
    before = llm.stats()
    with short_collections():
        speed = measure(name, llm, args)
    stats = llm.stats()
    metrics: dict[str, Metric] = {"tokens_per_second": metric(speed, "tokens/s")}
    on_gpu = HBM / (dense + experts)
    if name == "w2-gpu":
        limit = Limit(on_gpu, "tokens/s", "reading all weights of a token")
    elif name == "w2-prefill":
        total = engine.n_layers * engine.n_experts * engine.layout.weight_bytes
        limit = Limit(PROMPT * PCIE / total, "tokens/s", "PCIe, every expert uploaded once")
    else:
        tokens = stats["new_tokens"] - before["new_tokens"]
        missed = stats["experts_on_cpu"] - before.get("experts_on_cpu", 0)
        read = missed * engine.layout.weight_bytes / tokens  # a token
        metrics["host_read"] = metric([statistics.median(speed) * read / 1e9], "GB/s")
        metrics["host_bandwidth"] = metric([bandwidth / 1e9], "GB/s")
        metrics["hit_rate"] = metric([100 * (1 - read / experts)], "%")
        seconds = max(read / bandwidth, 1 / on_gpu)
        limit = Limit(1 / seconds, "tokens/s", "reading missing experts from host memory")
    shape = "Mixtral-8x7B, 6 layers" if name.startswith("mixtral") else "W2"
    where = {"w2-gpu": "all experts on the GPU"}.get(name, "no expert on the GPU")
    if "quarter" in name:
        where = f"{stats['expert_slots']} of {engine.n_layers * engine.n_experts} experts cached"
        where += ", random weights" if "random" in name else ", routing of gpt-oss"
    what = f"a prompt of {PROMPT} tokens" if name == "w2-prefill" else "one request"
    details = {
        "row": f"{shape}, {what}, {where}",
        "show": [key for key in metrics if key != "tokens_per_second"],
        "tokens": args.tokens,
        "placement": engine.describe(),
    }
    write_record(f"serve-{name}", details, metrics, limit, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=(*SLOTS, "mixtral-6"))
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--routing", type=Path, help="recorded routing of gpt-oss, for w2-quarter")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    bandwidth = host_bandwidth()
    for config in (w2, mixtral):
        own = [name for name in args.names if name.startswith("mixtral") == (config is mixtral)]
        if not own:
            continue
        settings = overspill.Settings(residency=False, follow_usage=False)
        model = overspill.from_config(
            config(), dtype=torch.bfloat16, train=False, quiet=True, settings=settings
        )
        engine = model.overspill
        for name in sorted(own, key=[*SLOTS, "mixtral-6"].index):
            count = engine.n_experts if name == "w2-gpu" else 0
            if engine.homes != [count] * engine.n_layers:
                engine.set_homes([count] * engine.n_layers)
            slots = SLOTS.get(name, 0)
            with overspill.LLM(model, context=4096, max_batch=16, slots=slots) as llm:
                run(name, llm, args, bandwidth)
        engine.close()


if __name__ == "__main__":
    main()
