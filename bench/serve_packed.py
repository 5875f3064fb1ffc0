"""Tokens a second with packed experts: random weights, made without a checkpoint. Parts of the same
model share it, so name them in one call.

PYTHONPATH=src python3 bench/serve_packed.py w2-gpu w2-none w2-fp8
PYTHONPATH=src python3 bench/serve_packed.py 30b-24gib prefill
PYTHONPATH=src python3 bench/serve_packed.py 30b-24gib --plain        # bf16 instead, no record
PYTHONPATH=src python3 bench/serve_packed.py w2-gpu w2-none --smoke   # tiny, on the CPU
"""

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from packed_models import PLAIN, random_model
from record import Limit, Metric, metric, write_record
from serve import HBM, PCIE, Even, decode, host_bandwidth, qwen, tiny_qwen, token_bytes
from serve_prefill import MATRIX, Prompts, operations, speed

import overspill
from overspill.core.garbage import short_collections
from overspill.simulate import routed_by

GPU = 24
"""GiB of GPU memory for Qwen3-30B-A3B at full size."""
SIZES = (1, 16, 64)
QUARTER = 384
"""Experts of W2 in bf16 whose bytes slots may take."""


class Bench:
    """The parts of the benchmark, and their shared settings."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.smoke = args, args.smoke
        self.rounds, self.tokens = (1, 4) if args.smoke else (args.rounds, args.tokens)

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bandwidth of host memory."""
        return 1e9 if self.smoke else host_bandwidth()

    def config(self, layers: int) -> Any:
        return tiny_qwen() if self.smoke else qwen(layers)

    @contextmanager
    def model(self, layers: int, name: str, **given: Any) -> Iterator[Any]:
        """`name` says how experts are packed."""
        device, start = "cpu" if self.smoke else "cuda", time.perf_counter()
        made = random_model(self.config(layers), name, device=device, **given)
        print(f"{name}: made in {time.perf_counter() - start:.0f} s", flush=True)
        try:
            yield made
        finally:
            made.overspill.close()
            del made
            release_memory()

    def decode(self, llm: overspill.LLM, size: int) -> tuple[list[float], float]:
        """Tokens a second of each round, and missing experts of a step."""
        with short_collections():
            found = decode(llm, size, self.tokens, self.rounds)
        return [each.speed for each in found], statistics.median(each.missing for each in found)

    def write(
        self,
        name: str,
        row: str,
        metrics: dict[str, Metric],
        limit: Limit | None,
        model: Any,
        **more: Any,
    ) -> None:
        headline = next(iter(metrics))
        config = {
            "row": row, "show": [key for key in metrics if key != headline],
            "tokens": self.tokens, "placement": model.overspill.describe(), **more,
        }  # fmt: skip
        write_record(name, config, metrics, limit, self.args.out)


def run_30b(bench: Bench, parts: Sequence[str]) -> None:
    """Qwen3-30B-A3B at full size; its experts fit on the card with 4 bits."""
    name = PLAIN if bench.args.plain else "mxfp4"
    with gpu_memory(GPU), bench.model(48, name, **budget(bench)) as model:
        if "30b-24gib" in parts:
            run_requests(bench, model, name)
            release_memory()
        if "prefill" in parts:
            run_prefill(bench, model, name)


def run_requests(bench: Bench, model: Any, name: str) -> None:
    """1, 16 and 64 requests at once."""
    engine, metrics = model.overspill, {}
    most = HBM / step_bytes(model, 1)
    with overspill.LLM(model, context=512, max_batch=max(SIZES)) as llm:
        for size in SIZES:
            speeds, missing = bench.decode(llm, size)
            key = "tokens_per_second" if size == 1 else f"of_{size}_requests"
            metrics[key] = metric(speeds, "tokens/s")
            metrics[f"share_{size}"] = metric(
                [100 * each * step_bytes(model, size) / size / HBM for each in speeds], "%"
            )
            print(f"{name}, {size} requests: {speeds}, {missing} missing", flush=True)
        resident = sum(engine.residents) / engine.n_layers / engine.n_experts
        metrics["on_gpu"] = metric([100 * resident], "%")
        if not bench.args.plain:
            limit = Limit(most, "tokens/s", "reading all weights of a token")
            row = f"Qwen3-30B-A3B at full size, MXFP4, {GPU} GiB; 1, 16 and 64 requests"
            compare = "bf16: 48, 58, 160"
            bench.write("serve-30b-24gib-4bit", row, metrics, limit, model, compare=compare)


def run_prefill(bench: Bench, model: Any, name: str) -> None:
    """A prompt of 8,192 tokens, every expert with the same number of rows."""
    length, engine = 64 if bench.smoke else 8192, model.overspill
    prompts = (lambda count: list(range(count))) if bench.smoke else Prompts()
    routing = Even(engine.n_layers, engine.n_experts, model.config.num_experts_per_tok)
    context = 128 if bench.smoke else 10_000
    with (
        overspill.LLM(model, context=context, max_batch=2) as llm,
        routed_by(model, routing),
    ):
        speed(llm, prompts, 64, 1)
        speed(llm, prompts, length, 2)
        before = uploads(engine)
        speeds = speed(llm, prompts, length, bench.rounds)
        uploaded = (uploads(engine) - before) / bench.rounds
        print(f"{name}: {speeds} tokens/s, {uploaded / 1e9:.1f} GB uploaded", flush=True)
        if bench.args.plain:
            return
        # codes are read, weights written and read again
        plain = engine.shape.numel * 2
        moved = engine.n_layers * engine.n_experts * (engine.layout.weight_bytes + 2 * plain)
        seconds = operations(model.config, length) / MATRIX + moved / HBM
        limit = Limit(
            length / max(seconds, uploaded / PCIE), "tokens/s",
            "matrix products in bf16, after unpacking every expert once in GPU memory",
        )  # fmt: skip
        metrics = {
            "tokens_per_second": metric(speeds, "tokens/s"),
            "share": metric([100 * each / limit.value for each in speeds], "%"),
            "uploaded": metric([uploaded / 1e9], "GB"),
        }
        row = f"Qwen3-30B-A3B at full size, MXFP4, {GPU} GiB"
        row += ", a prompt of 8,192 tokens, even routing"
        bench.write("prefill-30b-4bit", row, metrics, limit, model)


class Case(NamedTuple):
    """Where experts of W2 are, for one request."""

    prefix: str = ""
    """Prefix of the names of its metrics."""
    on_gpu: bool = False  # all experts
    plain_slots: int = 0
    """Slots have the bytes of so many experts in bf16."""


class W2(NamedTuple):
    """A record: a format, compared with bf16."""

    record: str
    packing: str
    cases: tuple[Case, ...]
    row: str


ON_GPU, NONE, CACHED = Case(on_gpu=True), Case(), Case("quarter_", plain_slots=QUARTER)
W2_PARTS = {
    "w2-gpu": W2(
        "serve-w2-gpu-4bit", "mxfp4", (ON_GPU,), "W2, MXFP4, one request, all experts on the GPU"
    ),
    "w2-none": W2(
        "serve-w2-none-4bit", "mxfp4", (NONE,), "W2, MXFP4, one request, no expert on the GPU"
    ),
    "w2-fp8": W2(
        "serve-w2-fp8", "fp8", (NONE, CACHED),
        "W2, FP8 in blocks, one request, no expert cached, and a quarter of the bytes of bf16",
    ),
}  # fmt: skip


def run_w2(bench: Bench, parts: Sequence[str]) -> None:
    """Each format is loaded once, bf16 first."""
    works = [W2_PARTS[name] for name in parts]
    plain: dict[Case, list[float]] = {}
    for name in dict.fromkeys((PLAIN, *(work.packing for work in works))):
        own = [work for work in works if name in (PLAIN, work.packing)]
        with bench.model(12, name, settings=overspill.Settings(residency=False)) as model:
            if name == PLAIN:
                for case in dict.fromkeys(case for work in own for case in work.cases):
                    plain[case] = run_case(bench, model, case, None)[0]
            else:
                for work in own:
                    write_w2(bench, model, work, plain)


def write_w2(bench: Bench, model: Any, work: W2, plain: dict[Case, list[float]]) -> None:
    metrics: dict[str, Metric] = {}
    limit: Limit | None = None
    for case in work.cases:
        _, part, most = run_case(bench, model, case, plain[case])
        metrics |= {case.prefix + key: value for key, value in part.items()}
        limit = limit or most  # that of the first case
    bench.write(work.record, work.row, metrics, limit, model)


def run_case(
    bench: Bench, model: Any, case: Case, plain: list[float] | None
) -> tuple[list[float], dict[str, Metric], Limit | None]:
    """Tokens a second; with the tokens a second of bf16, also their ratio."""
    engine = model.overspill
    engine.set_residents([engine.n_experts if case.on_gpu else 0] * engine.n_layers)
    slots = case.plain_slots * engine.shape.numel * 2 // engine.layout.weight_bytes
    if bench.smoke:
        slots = min(2, slots)
    with overspill.LLM(model, context=512, max_batch=1, slots=slots) as llm:
        if slots:
            bench.decode(llm, 1)  # the cache learns
        speeds, missing = bench.decode(llm, 1)
        on_cpu = llm.stats().get("experts_on_cpu", 0) > 0
    print(f"  {case}: {speeds} tokens/s", flush=True)
    if plain is None:
        return speeds, {}, None
    part = compared(speeds, plain)
    if case.on_gpu:
        most = HBM / step_bytes(model, 1)
        return speeds, part, Limit(most, "tokens/s", "reading all weights of a token")
    nbytes = max(missing, 1e-9) * engine.layout.weight_bytes
    part["host_read"] = metric([each * nbytes / 1e9 for each in speeds], "GB/s")
    part["missing_experts"] = metric([missing], "of a step")
    rate = bench.bandwidth if on_cpu else PCIE
    source = "host memory" if on_cpu else "host memory over PCIe"
    limit = Limit(rate / nbytes, "tokens/s", f"reading missing experts from {source}")
    return speeds, part, limit


def compared(speeds: list[float], plain: list[float]) -> dict[str, Metric]:
    """Tokens a second, and their ratio to those of bf16."""
    middle = statistics.median(plain)
    return {
        "tokens_per_second": metric(speeds, "tokens/s"),
        "bf16": metric(plain, "tokens/s"),
        "times_bf16": metric([each / middle for each in speeds], "x"),
    }


def step_bytes(model: Any, size: int) -> float:
    """Bytes of the weights that a step reads whose tokens choose any experts."""
    engine = model.overspill
    dense, experts = token_bytes(model)
    missed = (1 - model.config.num_experts_per_tok / engine.n_experts) ** size
    used = engine.n_experts * (1 - missed)
    return float(dense + experts * used / model.config.num_experts_per_tok)


def uploads(engine: Any) -> float:
    return float(engine.recorder.counters().get("upload", 0))


def budget(bench: Bench) -> dict[str, Any]:
    return {} if bench.smoke else {"gpu_memory": f"{GPU}GiB"}


def release_memory() -> None:
    """Frees models and LLMs that were closed, which have cycles, and their GPU memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def gpu_memory(gib: int) -> Iterator[None]:
    """Lets torch take no more memory of the GPU than a smaller one has."""
    if not torch.cuda.is_available():
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


MODEL_30B = ("30b-24gib", "prefill")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*MODEL_30B, *W2_PARTS])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="bf16 in 30b-24gib and prefill")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--out", default=None)
    args = parser.parse_args(arguments)
    bench = Bench(args)
    for parts, run in ((MODEL_30B, run_30b), (W2_PARTS, run_w2)):
        own = [name for name in args.names if name in parts]
        if own:
            run(bench, own)


if __name__ == "__main__":
    main()
