"""Tokens a second of Qwen3.6-35B-A3B's shape, three of four layers with linear attention, and how
long its prompts take: random weights, made without a checkpoint.

PYTHONPATH=src python3 bench/serve_qwen35.py gpu          # bf16, all experts on the GPU
PYTHONPATH=src python3 bench/serve_qwen35.py 24gib-4bit   # and parts that share its model:
PYTHONPATH=src python3 bench/serve_qwen35.py batch        # 16 requests, half with long prompts
PYTHONPATH=src python3 bench/serve_qwen35.py prefix       # a long beginning that two prompts share
PYTHONPATH=src python3 bench/serve_qwen35.py gpu --smoke  # tiny, on the CPU
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from packed_models import PLAIN, random_model
from record import Limit, Metric, metric, write_record
from serve import HBM, decode
from serve_packed import GPU, gpu_memory, step_bytes
from serve_prefill import FIRST, Prompts
from transformers import Qwen3_5MoeTextConfig

import overspill
from overspill.core.garbage import short_collections
from overspill.models.huggingface.recurrent import state_bytes

ROW = "Qwen3.6-35B-A3B at full size"
PACKED = "MXFP4"
SHORT = 64
"""Tokens of a short prompt."""
WARM = 4
"""Pairs of long prompts until kernels are compiled and the sizes of pieces are found."""


class Bench:
    """The parts of the benchmark, and their shared settings."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.smoke = args, args.smoke
        self.rounds, self.tokens = (1, 2) if args.smoke else (args.rounds, args.tokens)
        self.long, self.short, self.size = (40, 4, 2) if args.smoke else (8192, SHORT, 16)

    def config(self) -> Any:
        if not self.smoke:  # the defaults are the published shape
            return Qwen3_5MoeTextConfig(num_hidden_layers=self.args.layers)
        return Qwen3_5MoeTextConfig(
            vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, moe_intermediate_size=64, num_experts=4,
            shared_expert_intermediate_size=32, num_experts_per_tok=2, linear_key_head_dim=8,
            linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
            layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip

    @contextmanager
    def model(self, name: str, **given: Any) -> Iterator[Any]:
        """`name` says how experts are packed."""
        device, start = "cpu" if self.smoke else "cuda", time.perf_counter()
        made = random_model(self.config(), name, device=device, **given)
        print(f"{name}: made in {time.perf_counter() - start:.0f} s", flush=True)
        try:
            yield made
        finally:
            made.overspill.close()
            torch.cuda.empty_cache()

    @contextmanager
    def serving(self, model: Any, max_batch: int) -> Iterator[tuple[overspill.LLM, Prompts]]:
        """An LLM for long prompts."""
        context = self.long + 2 * self.short + self.tokens
        with overspill.LLM(model, context=context, max_batch=max_batch) as llm:
            yield llm, Prompts(min(30_000, model.config.vocab_size))

    def write(
        self, name: str, row: str, metrics: dict[str, Metric], limit: Limit | None, model: Any,
        **more: Any,
    ) -> None:  # fmt: skip
        headline = next(iter(metrics))
        config = {
            "row": f"{ROW}, {row}", "show": [key for key in metrics if key != headline],
            "tokens": self.tokens, "layers": model.config.num_hidden_layers,
            "placement": model.overspill.describe(), **more,
        }  # fmt: skip
        write_record(name, config, metrics, limit, self.args.out)


def run_gpu(bench: Bench, model: Any) -> None:
    """Everything on the GPU in bf16, one request."""
    metrics, limit = one_request(bench, model)
    bench.write("serve-qwen35-gpu", "bf16, one request", metrics, limit, model)


def run_24gib(bench: Bench, model: Any) -> None:
    """4 bits in the memory of a smaller GPU, one request."""
    metrics, limit = one_request(bench, model)
    row = f"{PACKED}, {GPU} GiB, one request"
    bench.write("serve-qwen35-24gib-4bit", row, metrics, limit, model)


def one_request(bench: Bench, model: Any) -> tuple[dict[str, Metric], Limit]:
    """Tokens a second, also through the model's own modules in the graph."""
    speeds = speeds_of_one(bench, model)
    print(f"{speeds} tokens/s", flush=True)
    modules = {}
    if not bench.smoke:
        with mock.patch("overspill.serve.decode.decode.read_decoder", return_value=None):
            modules = {"modules": metric(speeds_of_one(bench, model, 1), "tokens/s")}
    nbytes = step_bytes(model, 1) + 2 * state_bytes(model)
    most = HBM / nbytes
    metrics = {
        "tokens_per_second": metric(speeds, "tokens/s"),
        "share": metric([100 * each / most for each in speeds], "%"),
        "needed": metric([nbytes / 1e9], "GB a token"),
        **modules,
    }
    source = "reading all weights of a token, and its states, which are written too"
    return metrics, Limit(most, "tokens/s", source)


def speeds_of_one(bench: Bench, model: Any, rounds: int | None = None) -> list[float]:
    with overspill.LLM(model, context=512, max_batch=1) as llm, short_collections():
        found = [each.speed for each in decode(llm, 1, bench.tokens, rounds or bench.rounds)]
        hits = llm.stats().get("expert_hit_rate")
        print(f"{llm.stats().get('expert_slots')} slots, hits by layer {hits}", flush=True)
        return found


def run_batch(bench: Bench, model: Any) -> None:
    """Requests together, every second one with a long prompt, and the same one after another: with
    the same kernels, and as models are computed that cannot be batched."""
    with bench.serving(model, bench.size) as (llm, prompts):
        answer(llm, [prompts(bench.long), prompts(bench.short)], bench.tokens)  # kernels
        answer(llm, some(bench, prompts, bench.size), bench.tokens)
        together = [
            answer(llm, some(bench, prompts, bench.size), bench.tokens) for _ in range(bench.rounds)
        ]
        alone = one_by_one(llm, some(bench, prompts, 4), bench.tokens)
        waits = llm.stats()["time_to_first_token"]
        print(f"together {together}, alone {alone} tokens/s", flush=True)
        llm.close()
        with sequential(model, bench) as other:
            one_by_one(other, some(bench, prompts, 2), 2)
            before = one_by_one(other, some(bench, prompts, 2), min(bench.tokens, 32))
        metrics = {
            "tokens_per_second": metric(together, "tokens/s"),
            "one_by_one": metric([alone], "tokens/s"),
            "times_one_by_one": metric([each / alone for each in together], "x"),
            "sequential_runner": metric([before], "tokens/s"),
            "times_sequential_runner": metric([each / before for each in together], "x"),
            "first_token": metric([waits], "s"),
        }
        row = f"{PACKED}, {GPU} GiB, {bench.size} requests, half of them with {bench.long} tokens"
        bench.write("serve-qwen35-batch", row, metrics, None, model)


def run_prefix(bench: Bench, model: Any) -> None:
    """The first token of a prompt, and of another one with the same beginning, after answers that
    have filled the cache; also when prompts upload experts that are cached."""
    with bench.serving(model, 2) as (llm, prompts):
        engine = model.overspill
        engine.switch(replace(engine.settings, prompt_replicas=True))
        for _ in range(1 if bench.smoke else WARM):
            two_first_tokens(bench, llm, prompts)
        for _ in range(bench.rounds):
            answer(llm, [prompts(bench.short)], bench.tokens)
        found = [two_first_tokens(bench, llm, prompts) for _ in range(bench.rounds)]
        engine.switch(replace(engine.settings, prompt_replicas=False))
        uploaded = [two_first_tokens(bench, llm, prompts) for _ in range(bench.rounds)]
        print(f"first tokens after {found} s, with uploads {uploaded} s", flush=True)
        metrics = {
            "second": metric([second for _, second in found], "s"),
            "first": metric([first for first, _ in found], "s"),
            "share_of_first": metric([100 * second / first for first, second in found], "%"),
            "second_with_uploads": metric([second for _, second in uploaded], "s"),
        }
        row = f"{PACKED}, {GPU} GiB, the same {bench.long} tokens before another question"
        bench.write("prefix-qwen35", row, metrics, None, model)


def two_first_tokens(bench: Bench, llm: overspill.LLM, prompts: Prompts) -> tuple[float, float]:
    """Seconds until the first token of two prompts that begin in the same way."""
    beginning, found = prompts(bench.long), []
    for _ in range(2):
        prompt, start = [*beginning, *prompts(bench.short)], time.perf_counter()
        llm.generate([prompt], FIRST)
        found.append(time.perf_counter() - start)
    return found[0], found[1]


def some(bench: Bench, prompts: Prompts, count: int) -> list[list[int]]:
    """Prompts, every second one long."""
    return [prompts(bench.short if number % 2 else bench.long) for number in range(count)]


def answer(llm: overspill.LLM, asked: Sequence[list[int]], tokens: int) -> float:
    """Tokens a second of the answers, prompts included in the time."""
    params = overspill.SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(asked, params)
    return len(asked) * tokens / (time.perf_counter() - start)


def one_by_one(llm: overspill.LLM, asked: Sequence[list[int]], tokens: int) -> float:
    seconds = sum(tokens / answer(llm, [each], tokens) for each in asked)
    return len(asked) * tokens / seconds


@contextmanager
def sequential(model: Any, bench: Bench) -> Iterator[overspill.LLM]:
    """An LLM that computes one request after another, as transformers does."""
    context = bench.long + 2 * bench.short + bench.tokens
    reason = mock.patch("overspill.serve.llm.why_not_paged", return_value="to compare")
    with reason, overspill.LLM(model, context=context, max_batch=1) as llm:
        yield llm


PLAIN_PARTS: dict[str, Callable[[Bench, Any], None]] = {"gpu": run_gpu}
PACKED_PARTS = {"24gib-4bit": run_24gib, "prefix": run_prefix, "batch": run_batch}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*PLAIN_PARTS, *PACKED_PARTS])
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--out", default=None)
    args = parser.parse_args(arguments)
    bench = Bench(args)
    if plain := [run for name, run in PLAIN_PARTS.items() if name in args.names]:
        with bench.model(PLAIN, mode="gpu") as model:
            for run in plain:
                run(bench, model)
    if packed := [run for name, run in PACKED_PARTS.items() if name in args.names]:
        budget = {} if bench.smoke else {"gpu_memory": f"{GPU}GiB"}
        with gpu_memory(GPU), bench.model("mxfp4", **budget) as model:
            for run in packed:
                run(bench, model)


if __name__ == "__main__":
    main()
