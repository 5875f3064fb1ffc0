"""Tokens a second of one request, with experts on the GPU and in host memory.

PYTHONPATH=src python3 bench/serve.py w2-gpu w2-none w2-prefill
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

HBM = 4.5e12
"""Bytes a second that kernels of our own have read on an H200."""
PCIE = 55e9
PROMPT = 512
_READ = 4 << 30


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


def run(name: str, llm: overspill.LLM, args: argparse.Namespace, bandwidth: float) -> None:
    engine = llm.model.overspill
    on_gpu = name.endswith("-gpu")
    count = engine.n_experts if on_gpu else 0
    if engine.homes != [count] * engine.n_layers:
        engine.set_homes([count] * engine.n_layers)
    dense, experts = token_bytes(llm.model)
    metrics: dict[str, Metric] = {}
    with short_collections():
        if name.endswith("-prefill"):
            speed = prefill(llm, args.rounds)
            total = engine.n_layers * engine.n_experts * engine.layout.weight_bytes
            limit = Limit(PROMPT * PCIE / total, "tokens/s", "PCIe, every expert uploaded once")
        else:
            speed = decode(llm, args.tokens, args.rounds)
            limit = Limit(HBM / (dense + experts), "tokens/s", "reading all weights of a token")
            if not on_gpu:
                read = statistics.median(speed) * experts
                metrics["host_read"] = metric([read / 1e9], "GB/s")
                metrics["host_bandwidth"] = metric([bandwidth / 1e9], "GB/s")
                limit = Limit(bandwidth / experts, "tokens/s", "reading experts from host memory")
    metrics = {"tokens_per_second": metric(speed, "tokens/s"), **metrics}
    shape = "Mixtral-8x7B, 6 layers" if name.startswith("mixtral") else "W2"
    where = "all experts on the GPU" if on_gpu else "no expert on the GPU"
    what = f"a prompt of {PROMPT} tokens" if name.endswith("-prefill") else "one request"
    details = {
        "row": f"{shape}, {what}, {where}",
        "show": [key for key in metrics if key != "tokens_per_second"],
        "tokens": args.tokens,
        "placement": engine.describe(),
    }
    write_record(f"serve-{name}", details, metrics, limit, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = ("w2-gpu", "w2-none", "w2-prefill", "mixtral-6")
    parser.add_argument("names", nargs="+", choices=names)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    bandwidth = host_bandwidth()
    for config in (w2, mixtral):
        own = [name for name in args.names if name.startswith("mixtral") == (config is mixtral)]
        if not own:
            continue
        model = overspill.from_config(config(), dtype=torch.bfloat16, train=False, quiet=True)
        with overspill.LLM(model, context=4096, max_batch=16) as llm:
            for name in own:
                run(name, llm, args, bandwidth)
        model.overspill.close()


if __name__ == "__main__":
    main()
