"""Many clients for minutes, of which a third disconnect before the end of their answers.

PYTHONPATH=src python3 bench/server_load.py
PYTHONPATH=src python3 bench/server_load.py --seconds 20 --clients 16

Fails if an answer differs from that of the same prompt alone, if a request gets no answer, if
memory grows, or if blocks of the KV cache are not free at the end.
"""

import argparse
import gc
import http.client
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import Metric, metric, write_record
from server_client import Answer, Clients
from server_host import NAME, add_flags, describe, open_llm, serving, warm_up

import overspill

PATH = "/v1/completions"
_LONG = 1500
"""Tokens of the longest prompts: several chunks."""
_GROWTH = 64 << 20
"""Bytes that memory may grow from a third of the time to the end: allocators keep free memory."""
_LIKELIEST, _TIE = 5, 0.1
"""Another token of the likeliest is a tie if the logarithm of its probability is that near: experts
that are chosen differently by rounding change logits by some hundredths."""
_SETTLE = 15.0
"""Seconds until all is free after the last request."""


def make_bodies(vocabulary: int, count: int) -> list[dict[str, Any]]:
    """Requests with short and long prompts; some share their beginning."""
    choice = random.Random(0)
    common = [choice.randrange(vocabulary) for _ in range(200)]
    bodies = []
    for number in range(count):
        length = choice.choice([1, 7, 40, 40, 300, _LONG])
        prompt = [choice.randrange(vocabulary) for _ in range(length)]
        bodies.append(
            {
                "model": NAME, "prompt": common + prompt if number % 4 == 0 else prompt,
                "max_tokens": choice.choice([5, 40, 100]), "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True},
            }
        )  # fmt: skip
    return bodies


class Expected(NamedTuple):
    """The greedy answer to a prompt alone."""

    tokens: list[int]
    nearly: list[frozenset[int]]
    """For each token, the tokens that are as likely, up to rounding."""

    def agrees(self, text: str, complete: bool) -> str:
        """ "equal", "tie" or "different". Rounding depends on the size of a batch, so a request may
        continue with another of two tokens that are nearly as likely; what follows is another
        text."""
        given = [int(word.removeprefix("w")) for word in text.split()]
        for position, (token, own) in enumerate(zip(given, self.tokens, strict=False)):
            if token != own:
                return "tie" if token in self.nearly[position] else "different"
        fits = len(given) == len(self.tokens) if complete else len(given) <= len(self.tokens)
        return "equal" if fits else "different"


def expect(llm: overspill.LLM, bodies: Sequence[dict[str, Any]]) -> list[Expected]:
    found = []
    for body in bodies:
        params = overspill.SamplingParams(max_tokens=body["max_tokens"], logprobs=_LIKELIEST)
        (result,) = llm.generate([body["prompt"]], params)
        assert result.logprobs is not None
        nearly = [
            frozenset(token for token, log in logs.items() if log > logs[own] - _TIE)
            for own, logs in zip(result.token_ids, result.logprobs, strict=True)
        ]
        found.append(Expected(result.token_ids, nearly))
    return found


class Memory:
    """The memory of this process and of the GPU, read every second."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.samples.append(self._read())

    @staticmethod
    def _read() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        gpu = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        return pages * os.sysconf("SC_PAGE_SIZE") + gpu

    def growth(self) -> int:
        """Bytes from a third of the time to the end, each the median of a tenth of the samples."""
        self._ended.set()
        self._thread.join()
        count = len(self.samples)
        few = max(1, count // 10)
        early = self.samples[count // 3 : count // 3 + few]
        return int(statistics.median(self.samples[-few:]) - statistics.median(early))


def read_stats(address: tuple[str, int]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", "/stats")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def wait_until_free(address: tuple[str, int]) -> dict[str, Any]:
    """The figures of the server, when nothing runs or after some seconds."""
    end = time.monotonic() + _SETTLE
    while True:
        stats = read_stats(address)
        held = stats["kv_blocks"] - stats["kv_blocks_free"]
        if time.monotonic() > end or not any(
            (stats["running"], stats["waiting"], stats["in_flight"], held)
        ):
            return stats
        time.sleep(0.1)


def compare(answers: Sequence[Answer], expected: Sequence[Expected]) -> Counter[str]:
    """Count answers by their agreement with the expected ones, also beginnings of abandoned
    answers."""
    return Counter(
        expected[answer.number].agrees(answer.text, not answer.left)
        for answer in answers
        if answer.error is None
    )


def problems(
    answers: Sequence[Answer], agreement: Counter[str], stats: dict[str, Any], growth: int
) -> list[str]:
    """Failures that must not happen, in words."""
    found = []
    failed = [answer.error for answer in answers if answer.error is not None]
    if failed:
        found.append(f"{len(failed)} requests failed or got no answer; the first: {failed[0]}")
    if agreement["different"]:
        found.append(f"{agreement['different']} of {len(answers)} answers differ from those alone")
    held = stats["kv_blocks"] - stats["kv_blocks_free"]
    open_ = stats["running"] + stats["waiting"] + stats["in_flight"]
    if held or open_:
        found.append(f"{held} blocks are held and {open_} requests open after the end")
    if growth > _GROWTH:
        found.append(f"memory has grown by {growth / 2**20:.0f} MiB")
    return found


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures(answers: Sequence[Answer], seconds: float, growth: int) -> dict[str, Metric]:
    complete = [answer for answer in answers if not answer.left and answer.error is None]
    pieces = sum(len(answer.times) for answer in answers)
    firsts = [1000 * answer.times[0] for answer in complete]
    gaps = [
        1000 * (later - earlier)
        for answer in complete
        for earlier, later in zip(answer.times, answer.times[1:], strict=False)
    ]
    return {
        "tokens_per_second": metric([pieces / seconds], "tokens/s"),
        "complete": metric([len(complete)], "answers"),
        "disconnected": metric([sum(answer.left for answer in answers)], "answers"),
        "first_token_p50": metric([percentile(firsts, 0.5)], "ms"),
        "first_token_p99": metric([percentile(firsts, 0.99)], "ms"),
        "gap_p50": metric([percentile(gaps, 0.5)], "ms"),
        "gap_p99": metric([percentile(gaps, 0.99)], "ms"),
        "memory_growth": metric([growth / 2**20], "MiB"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_flags(parser, "float32")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--requests", type=int, default=64, help="different requests")
    parser.add_argument("--name", default="server-load", help="of the record")
    args = parser.parse_args()
    with open_llm(args) as llm:
        bodies = make_bodies(llm.model.config.vocab_size, args.requests)
        warm_up(llm, args.max_batch)
        expected = expect(llm, bodies)
        print(f"{len(bodies)} prompts answered alone", flush=True)
        with Clients() as clients, serving(llm, args.max_batch) as address:
            gc.collect()
            memory, start = Memory(), time.perf_counter()
            answers = clients.load(address, PATH, bodies, args.clients, args.seconds, 1 / 3)
            seconds = time.perf_counter() - start
            growth, stats = memory.growth(), wait_until_free(address)
        agreement = compare(answers, expected)
        metrics = {
            **figures(answers, seconds, growth),
            "equal": metric([agreement["equal"]], "answers"),
            "ties": metric([agreement["tie"]], "answers"),
        }
        details = {
            "row": f"{describe(llm, args)}: {args.clients} clients for {args.seconds:g} s, a third "
            "of the answers abandoned, each token as alone",
            "show": [key for key in metrics if key != "tokens_per_second"],
            "prompts": len(bodies),
            "kv_blocks": stats["kv_blocks"],
        }
    found = problems(answers, agreement, stats, growth)
    if found:
        print({key: round(value.median, 2) for key, value in metrics.items()})
        raise SystemExit("; ".join(found))
    write_record(args.name, details, metrics, None, args.out)


if __name__ == "__main__":
    main()
