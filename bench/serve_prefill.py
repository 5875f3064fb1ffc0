"""Tokens a second of long prompts, until their first token, and how long a short prompt waits that
arrives meanwhile.

PYTHONPATH=src python3 bench/serve_prefill.py 30b w2
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from packed_models import PLAIN, random_model
from record import Limit, Metric, metric, write_record
from serve import PCIE, Even, qwen, w2

import overspill
from overspill.simulate import routed_by

MATRIX = 786e12
"""Operations a second of bf16 matrix products on an H200."""
FIRST = overspill.SamplingParams(max_tokens=1, ignore_eos=True)
SHORT = 64
ARMS = ("uploads", "replicas")
_DELAYS = (0.05, 0.15, 0.3, 0.5)
"""Seconds after which a short prompt arrives."""


class Prompts:
    """Random prompts, none of which begins like another."""

    def __init__(self, vocabulary: int = 30_000) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._vocabulary = vocabulary

    def __call__(self, tokens: int) -> list[int]:
        return torch.randint(100, self._vocabulary, (tokens,), generator=self._random).tolist()


def speed(llm: overspill.LLM, prompts: Prompts, tokens: int, rounds: int) -> list[float]:
    """Tokens a second of a prompt, alone."""
    found = []
    for _ in range(rounds):
        prompt, start = prompts(tokens), time.perf_counter()
        llm.generate([prompt], FIRST)
        found.append(tokens / (time.perf_counter() - start))
    return found


def wait_of_short(
    llm: overspill.LLM, prompts: Prompts, tokens: int, delays: Sequence[float]
) -> list[float]:
    """Seconds until the first token of a short prompt that arrives some time after a long one."""
    found = []
    for delay in delays:
        long = llm.submit(prompts(tokens), FIRST)
        time.sleep(delay)
        start = time.perf_counter()
        short = llm.submit(prompts(SHORT), FIRST)
        short.result()
        found.append(time.perf_counter() - start)
        long.result()
    return found


def operations(config: Any, tokens: int) -> float:
    """Operations of a prompt: matrix products of the weights of each token, and attention."""
    d, width = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    experts = config.num_experts_per_tok * 3 * d * config.moe_intermediate_size
    dense = 2 * d * width * (heads + kv_heads) + d * config.num_experts
    attention = 2 * heads * width * tokens * tokens  # scores and values, half of them masked
    layers: int = config.num_hidden_layers
    return layers * (2.0 * tokens * (experts + dense) + attention)


def run_30b(args: argparse.Namespace, even: bool) -> None:
    """Qwen3-30B-A3B at full size in 24 GiB."""
    config = qwen()
    model = overspill.from_config(
        config, args.gpu_memory, dtype=torch.bfloat16, train=False, quiet=True
    )
    engine, prompts = model.overspill, Prompts()
    routing = Even(engine.n_layers, engine.n_experts, config.num_experts_per_tok)
    metrics: dict[str, Metric] = {}
    limit = None
    with (
        overspill.LLM(model, context=32_768, max_batch=4, prefill_chunk=args.chunk) as llm,
        routed_by(model, routing) if even else nullcontext(),
    ):
        speed(llm, prompts, 64, 2)  # kernels
        first = speed(llm, prompts, 8192, 1)
        speed(llm, prompts, 30_000, 2)
        for tokens in (8192, 30_000):
            before = engine.recorder.counters()["upload"]
            speeds = speed(llm, prompts, tokens, args.rounds)
            uploaded = (engine.recorder.counters()["upload"] - before) / args.rounds
            name = "tokens_per_second" if tokens == 8192 else f"of_{tokens}_tokens"
            metrics[name] = metric(speeds, "tokens/s")
            metrics[f"uploaded_{tokens}"] = metric([uploaded / 1e9], "GB")
            if tokens == 8192:
                seconds = max(uploaded / PCIE, operations(config, tokens) / MATRIX)
                limit = Limit(tokens / seconds, "tokens/s", "uploads of one pass over PCIe")
        metrics["first_prompt"] = metric(first, "tokens/s")
        # a prompt of 64 tokens, alone and beside a long one
        alone = [SHORT / each for each in speed(llm, prompts, SHORT, args.rounds)]
        metrics["short_alone"] = metric(alone, "s")
        for tokens in (8192, 30_000):
            waits = wait_of_short(llm, prompts, tokens, _DELAYS)
            metrics[f"short_beside_{tokens}"] = metric(waits, "s")
        peak = torch.cuda.max_memory_reserved() / 2**30
        metrics["gpu_memory"] = metric([peak], "GiB")
    with (
        overspill.LLM(model, context=32_768, max_batch=4, prefill_chunk=512) as llm,
        routed_by(model, routing) if even else nullcontext(),
    ):
        metrics["pieces_of_512"] = metric(speed(llm, prompts, 8192, 2), "tokens/s")
        waits = wait_of_short(llm, prompts, 8192, _DELAYS)
        metrics["short_beside_pieces_of_512"] = metric(waits, "s")
    name = "even routing" if even else "random weights"
    details = {
        "row": f"Qwen3-30B-A3B at full size, 24 GiB, a prompt of 8,192 tokens, {name}",
        "show": [key for key in metrics if key != "tokens_per_second"],
        "placement": engine.describe(),
        "prefill_chunk": args.chunk,
    }
    suffix = "-even" if even else ""
    write_record(f"serve-prefill-30b{suffix}", details, metrics, limit, args.out)
    engine.close()


def run_w2(args: argparse.Namespace) -> None:
    """W2 with everything on the GPU."""
    config = w2()
    model = overspill.from_config(config, dtype=torch.bfloat16, train=False, quiet=True)
    engine, prompts = model.overspill, Prompts()
    engine.set_residents([engine.n_experts] * engine.n_layers)
    with overspill.LLM(model, context=32_768, max_batch=4, prefill_chunk=args.chunk) as llm:
        speed(llm, prompts, 8192, 6)
        speeds = speed(llm, prompts, 8192, args.rounds)
    limit = Limit(8192 * MATRIX / operations(config, 8192), "tokens/s", "bf16 matrix products")
    metrics = {
        "tokens_per_second": metric(speeds, "tokens/s"),
        "share": metric([100 * each / limit.value for each in speeds], "%"),
    }
    details = {
        "row": "W2, a prompt of 8,192 tokens, all experts on the GPU",
        "show": ["share"],
        "placement": engine.describe(),
        "prefill_chunk": args.chunk,
    }
    write_record("serve-prefill-w2", details, metrics, limit, args.out)
    engine.close()


def run_cached(args: argparse.Namespace) -> None:
    """W2 with half of its experts cached: prompts of 512 tokens, with and without replicas, and
    decoding between them."""
    config = qwen(12)
    model = random_model(config, PLAIN, mode="host", slots=2 * config.num_experts, device="cuda")
    engine, prompts = model.overspill, Prompts()
    engine.set_residents([0] * engine.n_layers)
    cached = engine.n_layers * engine.n_experts // 2
    switches = {name: replace(engine.settings, prompt_replicas=name == "replicas") for name in ARMS}
    longer = overspill.SamplingParams(max_tokens=65, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    decoded: dict[str, list[float]] = {name: [] for name in ARMS}
    uploaded = dict.fromkeys(ARMS, 0)
    with overspill.LLM(model, context=4096, max_batch=4, slots=cached) as llm:
        for _ in range(8):
            llm.generate([prompts(512)], longer)  # kernels, and the cache
        for _ in range(args.rounds):
            for name in ARMS:
                engine.switch(switches[name])
                llm.generate([prompts(512)], FIRST)
                before = engine.recorder.counters()["upload"]
                seconds[name] += [512 / each for each in speed(llm, prompts, 512, 4)]
                uploaded[name] += engine.recorder.counters()["upload"] - before
                start = time.perf_counter()
                llm.generate([prompts(64)], longer)
                decoded[name].append(64 / (time.perf_counter() - start))
    pairs = zip(seconds["uploads"], seconds["replicas"], strict=True)
    tokens = zip(decoded["uploads"], decoded["replicas"], strict=True)
    experts = engine.n_layers * engine.n_experts * engine.layout.weight_bytes
    metrics = {
        "with": metric([512 / each for each in seconds["replicas"]], "tokens/s"),
        "speedup": metric([without / with_ for without, with_ in pairs], "x"),
        "uploaded": metric([uploaded["replicas"] / max(1, uploaded["uploads"])], "x"),
        "decode": metric([with_ / without for without, with_ in tokens], "x"),
        "without": metric([512 / each for each in seconds["uploads"]], "tokens/s"),
    }
    limit = Limit(512 / (experts / 2 / PCIE), "tokens/s", "half of the experts over PCIe")
    details = {
        "row": "W2, prompts of 512 tokens, half of the experts cached",
        "show": ["speedup", "uploaded", "decode", "without"],
        "placement": engine.describe(),
    }
    write_record("serve-prefill-cached", details, metrics, limit, args.out)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=["30b", "30b-even", "w2", "cached"])
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--chunk", type=int, help="tokens of prompts in a batch at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    for name in args.names:
        if name == "w2":
            run_w2(args)
        elif name == "cached":
            run_cached(args)
        else:
            run_30b(args, even=name == "30b-even")


if __name__ == "__main__":
    main()
