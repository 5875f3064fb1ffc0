"""Tokens a second of one request or several, with experts on the GPU and in host memory.

PYTHONPATH=src python3 bench/serve.py w2-gpu w2-none w2-prefill w2-quarter-random mixtral-6
PYTHONPATH=src python3 bench/serve.py w2-gpu w2-quarter batch-1 w2-gpu-16 batch-16 \
    --routing gptoss20b_decode_experts_only.npz --timeline FOLDER
PYTHONPATH=src python3 bench/serve.py ssd --disk FOLDER
"""

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from record import Limit, Metric, metric, write_record
from serve_timeline import draw_tokens, record_tokens
from ssd import disk_bandwidth
from transformers import MixtralConfig, Qwen3MoeConfig

import overspill
from overspill.compute.cpu_kernel import read_bandwidth
from overspill.core.garbage import short_collections
from overspill.hardware.machine import usable_cores
from overspill.simulate import DrawnRouting, ReplayedRouting, routed_by

HBM = 4.5e12
"""Bytes a second that kernels of our own have read on an H200."""
PCIE = 55e9
PROMPT = 512
_READ = 4 << 30
ALL = "reading all weights of a token"
HOST = "reading missing experts from host memory"
SUM = "a step with all experts on the GPU, and reading the missing ones from host memory"


def w2() -> Any:
    """Qwen3-30B-A3B, cut to 12 of 48 layers."""
    return qwen(12)


def qwen(layers: int = 48) -> Any:
    """Qwen3-30B-A3B, with all layers or fewer."""
    return Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, rope_theta=1e6,
        max_position_embeddings=40_960, tie_word_embeddings=False,
    )  # fmt: skip


def tiny_qwen(context: int = 512, **more: Any) -> Any:
    """A small model of this family, for smoke tests on the CPU."""
    return Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=context,
        tie_word_embeddings=False, **more,
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


class Round(NamedTuple):
    """New tokens of some requests, without their prompts."""

    speed: float  # tokens a second
    missing: float  # experts of a step that were not on the GPU


def decode(llm: overspill.LLM, size: int, tokens: int, rounds: int) -> list[Round]:
    """Rounds of `size` requests at once, at temperature 1."""
    found = []
    for number in range(rounds + 1):
        params = [
            overspill.SamplingParams(
                max_tokens=tokens, temperature=1.0, seed=size * number + request, ignore_eos=True
            )
            for request in range(size)
        ]
        prompts = [[100 + request, 2, 3, 4, 5, 6, 7, 8] for request in range(size)]
        before = llm.stats()
        if size == 1:
            for _ in llm.stream(prompts[0], params[0]):
                pass
        else:
            llm.generate(prompts, params)
        after = llm.stats()
        seconds = after["decode_seconds"] - before["decode_seconds"]
        count = after["decode_tokens"] - before["decode_tokens"]
        missing = after.get("experts_missed", 0) - before.get("experts_missed", 0)
        found.append(Round(count / seconds, missing * size / count))
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


def read_routing(path: Path, n_layers: int, n_experts: int) -> ReplayedRouting:
    """Recorded routing of a model with half as many experts for each token, for twice as many
    layers: a layer has the experts of two."""
    with np.load(path, allow_pickle=False) as file:
        experts_TLK = torch.from_numpy(file["experts"].astype(np.uint8))
    half = int(experts_TLK.max()) + 1
    assert experts_TLK.shape[1] >= 2 * n_layers
    assert n_experts >= 2 * half
    first, second = (experts_TLK[:, number : 2 * n_layers : 2] for number in range(2))
    return ReplayedRouting(torch.cat((first, second + half), dim=2), n_experts)


class Even:
    """Every token has the next experts in turn: a prompt needs them all."""

    def __init__(self, n_layers: int, n_experts: int, top_k: int) -> None:
        self.n_layers, self.n_experts, self.top_k = n_layers, n_experts, top_k

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> torch.Tensor:
        ids = torch.arange(n_tokens * self.top_k, device=device) % self.n_experts
        return ids.view(n_tokens, self.top_k)


class Work(NamedTuple):
    """Measurements with one LLM."""

    name: str
    slots: int = 0
    on_gpu: bool = False  # all experts
    size: int = 1  # of a batch
    compare: str = ""  # tokens a second of others on the same kind of machine


WORKS = [
    *(Work(f"w2-gpu-{size}", on_gpu=True, size=size) for size in (4, 16, 64)),
    Work("w2-gpu", on_gpu=True, compare="FreeToken 0.2.1 761, llama.cpp 688"),
    Work("w2-none", compare="llama.cpp 68"),
    Work("w2-prefill", compare="FreeToken 1,770, llama.cpp 523"),
    Work("w2-quarter-random", 384, compare="FreeToken 580 (uploads), 325 (CPU)"),
    Work("w2-quarter", 384),
    *(Work(f"batch-{size}", 384, size=size) for size in (1, 4, 16, 64)),
    Work("mixtral-6", compare="llama.cpp 21.1"),
]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.bandwidth = host_bandwidth()
        self.on_gpu: dict[int, float] = {}
        """Seconds of a step with all experts on the GPU, by the size of the batch."""

    def run(self, work: Work, llm: overspill.LLM) -> None:
        args, engine = self.args, llm.model.overspill
        if work.name == "w2-prefill":
            top_k = llm.model.config.num_experts_per_tok
            with routed_by(llm.model, Even(engine.n_layers, engine.n_experts, top_k)):
                speed = prefill(llm, args.rounds)
            total = engine.n_layers * engine.n_experts * engine.layout.weight_bytes
            limit = Limit(PROMPT * PCIE / total, "tokens/s", "PCIe, every expert uploaded once")
            self.write(work, llm, {"tokens_per_second": metric(speed, "tokens/s")}, limit)
            return
        with short_collections(), self.routing(work, llm):
            if work.slots:
                decode(llm, 1, args.tokens, 2)  # the cache learns
            rounds = decode(llm, work.size, args.tokens, args.rounds)
            if args.timeline is not None:
                spans = record_tokens(llm, work.size, 40 if work.size == 1 else 10)
                path = args.timeline / f"timeline-{work.name}"
                draw_tokens(spans, path, f"{row(work, engine)}: two steps")
        metrics = {"tokens_per_second": metric([each.speed for each in rounds], "tokens/s")}
        dense, experts = token_bytes(llm.model)
        if work.on_gpu:
            self.on_gpu[work.size] = work.size / statistics.median(each.speed for each in rounds)
            limit = Limit(HBM / (dense + experts), "tokens/s", ALL)
            if work.size == 1:
                self.write(work, llm, metrics, limit)
            return
        size = engine.layout.weight_bytes
        seconds = self.on_gpu.get(work.size, (dense + experts) / HBM) if work.slots else 0.0
        predicted = [
            work.size / (seconds + each.missing * size / self.bandwidth) for each in rounds
        ]
        shares = [100 * each.speed / most for each, most in zip(rounds, predicted, strict=True)]
        read = [each.speed / work.size * each.missing * size / 1e9 for each in rounds]
        metrics |= {
            "share": metric(shares, "%"),
            "missing_experts": metric([each.missing for each in rounds], "of a step"),
            "host_read": metric(read, "GB/s"),
            "host_bandwidth": metric([self.bandwidth / 1e9], "GB/s"),
        }
        limit = Limit(statistics.median(predicted), "tokens/s", SUM if work.slots else HOST)
        self.write(work, llm, metrics, limit)

    def routing(self, work: Work, llm: overspill.LLM) -> AbstractContextManager[None]:
        engine = llm.model.overspill
        if not work.slots or "random" in work.name:
            return nullcontext()
        trace = read_routing(self.args.routing, engine.n_layers, engine.n_experts)
        return routed_by(llm.model, trace)

    def write(
        self, work: Work, llm: overspill.LLM, metrics: dict[str, Metric], limit: Limit
    ) -> None:
        engine = llm.model.overspill
        details = {
            "row": row(work, engine),
            "compare": work.compare,
            "show": [key for key in metrics if key != "tokens_per_second"],
            "tokens": self.args.tokens,
            "placement": engine.describe(),
        }
        write_record(f"serve-{work.name}", details, metrics, limit, self.args.out)


def row(work: Work, engine: Any) -> str:
    shape = "Mixtral-8x7B, 6 layers" if work.name.startswith("mixtral") else "W2"
    what = "one request" if work.size == 1 else f"{work.size} requests"
    if work.name == "w2-prefill":
        what = f"a prompt of {PROMPT} tokens"
    where = "all experts on the GPU" if work.on_gpu else "no expert on the GPU"
    if work.slots:
        where = f"{work.slots} of {engine.n_layers * engine.n_experts} experts cached"
        where += ", random weights" if "random" in work.name else ", routing of gpt-oss"
    return f"{shape}, {what}, {where}"


class ReadTokens(NamedTuple):
    """New tokens of a request, without its prompt."""

    speed: float  # tokens a second
    nbytes: float  # read from disk for a token


def read_tokens(llm: overspill.LLM, number: int, tokens: int) -> ReadTokens:
    recorder = llm.model.overspill.recorder
    params = overspill.SamplingParams(max_tokens=tokens + 1, temperature=1.0, ignore_eos=True)
    pieces = llm.stream([100 + number, 2, 3, 4], params)
    next(pieces)  # the prompt
    before, start = recorder.counters()["ssd read"], time.perf_counter()
    for _ in pieces:
        pass
    seconds, nbytes = time.perf_counter() - start, recorder.counters()["ssd read"] - before
    print(f"{tokens} tokens in {seconds:.1f} s, {nbytes / 1e9:.1f} GB from disk", flush=True)
    return ReadTokens(tokens / seconds, nbytes / tokens)


def run_on_disk(bench: Bench) -> None:
    """W2 with 4 GiB of host memory: most experts are read from disk. With the routers of random
    weights most of them are found in memory again; with even routing every expert is as likely as
    any other."""
    args = bench.args
    settings = overspill.Settings(residency=False)
    model = overspill.from_config(
        w2(), "8GiB", "4GiB", args.disk, torch.bfloat16, train=False, quiet=True, settings=settings
    )  # fmt: skip
    engine = model.overspill
    bandwidth = disk_bandwidth(args.disk, engine.layout.weight_bytes, 256)["read"]
    shares = [[1 / engine.n_experts] * engine.n_experts] * engine.n_layers
    even = DrawnRouting(shares, model.config.num_experts_per_tok)
    with overspill.LLM(model, context=4096) as llm, short_collections():
        write_on_disk("ssd", "random weights", llm, bandwidth, args, 3 * args.tokens_on_disk)
        with routed_by(model, even):
            write_on_disk("ssd-even", "even routing", llm, bandwidth, args, args.tokens_on_disk)
    engine.close()


def write_on_disk(
    name: str, routing: str, llm: overspill.LLM, bandwidth: float, args: argparse.Namespace, n: int
) -> None:
    """`n` tokens in each round; the first one fills the memory."""
    found = [read_tokens(llm, number, n) for number in range(args.rounds + 1)][1:]
    _, needed = token_bytes(llm.model)
    speeds = [read.speed * read.nbytes for read in found]
    metrics = {
        "tokens_per_second": metric([read.speed for read in found], "tokens/s"),
        "share": metric([100 * speed / bandwidth for speed in speeds], "%"),
        "disk_read": metric([speed / 1e9 for speed in speeds], "GB/s"),
        "disk_bandwidth": metric([bandwidth / 1e9], "GB/s"),
        "needed": metric([needed / 1e9], "GB a token"),
    }
    details = {
        "row": f"W2, one request, 4 GiB of host memory, the other experts on disk, {routing}",
        "show": ["share", "disk_read", "disk_bandwidth", "needed"],
        "tokens": n,
        "placement": llm.model.overspill.describe(),
    }
    each = statistics.median(read.nbytes for read in found)
    limit = Limit(bandwidth / each, "tokens/s", "reading missing experts from disk")
    write_record(f"serve-{name}", details, metrics, limit, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*(work.name for work in WORKS), "ssd"])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of the CPU, for missing experts")
    parser.add_argument("--routing", type=Path, help="recorded routing of gpt-oss")
    parser.add_argument("--disk", type=Path, help="folder for experts, for ssd")
    parser.add_argument("--tokens-on-disk", type=int, default=20)
    parser.add_argument("--timeline", type=Path, help="folder for timelines")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    bench = Bench(args)
    chosen = [work for work in WORKS if work.name in args.names]
    if "ssd" in args.names:
        run_on_disk(bench)
    for config in (w2, mixtral):
        own = [work for work in chosen if work.name.startswith("mixtral") == (config is mixtral)]
        if not own:
            continue
        settings = overspill.Settings(residency=False, threads=args.threads)
        model = overspill.from_config(
            config(), dtype=torch.bfloat16, train=False, quiet=True, settings=settings
        )
        engine = model.overspill
        for work in own:
            residents = [engine.n_experts if work.on_gpu else 0] * engine.n_layers
            if engine.residents != residents:
                engine.set_residents(residents)
            largest = max(16, work.size)
            with overspill.LLM(model, context=4096, max_batch=largest, slots=work.slots) as llm:
                bench.run(work, llm)
        engine.close()


if __name__ == "__main__":
    main()
