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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from record import Metric, metric, write_record
from server_client import Answer, Clients
from server_host import NAME, add_flags, describe, open_llm, serving

import overspill

PATH = "/v1/completions"
_LONG = 1500
"""Tokens of the longest prompts: several chunks."""
_GROWTH = 64 << 20
"""Bytes that memory may grow from a third of the time to the end: allocators keep free memory."""
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


def decided(
    llm: overspill.LLM, bodies: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The requests that have the same answer in batches of other sizes, and these answers. With
    random weights two tokens or experts may be equally likely but for the rounding, which depends
    on the size of a batch."""
    answers: list[list[str]] = []
    for size in (1, 5, 16):
        found: list[str] = []
        for start in range(0, len(bodies), size):
            chosen = bodies[start : start + size]
            params = [overspill.SamplingParams(max_tokens=body["max_tokens"]) for body in chosen]
            results = llm.generate([body["prompt"] for body in chosen], params)
            found += [result.text for result in results]
        answers.append(found)
    same = [len(set(texts)) == 1 for texts in zip(*answers, strict=True)]
    kept = [number for number, is_same in enumerate(same) if is_same]
    return [bodies[number] for number in kept], [answers[0][number] for number in kept]


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


def problems(
    answers: Sequence[Answer], expected: Sequence[str], stats: dict[str, Any], growth: int
) -> list[str]:
    """What must not happen, in words."""
    found = []
    failed = [answer.error for answer in answers if answer.error is not None]
    if failed:
        found.append(f"{len(failed)} requests failed or got no answer; the first: {failed[0]}")
    complete = [answer for answer in answers if not answer.left and answer.error is None]
    different = [answer for answer in complete if answer.text != expected[answer.number]]
    if different:
        found.append(f"{len(different)} of {len(complete)} answers differ from those alone")
    wrong = [a for a in answers if a.left and not expected[a.number].startswith(a.text)]
    if wrong:
        found.append(f"{len(wrong)} beginnings of answers that were left differ")
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
    args = parser.parse_args()
    with open_llm(args) as llm:
        made = make_bodies(llm.model.config.vocab_size, args.requests)
        bodies, expected = decided(llm, made)
        print(f"{len(bodies)} of {len(made)} prompts have the same answer in all batches")
        if len(bodies) < len(made) // 2:
            raise SystemExit("too few prompts are independent of rounding; use --dtype float32")
        with Clients() as clients, serving(llm, args.max_batch) as address:
            gc.collect()
            memory, start = Memory(), time.perf_counter()
            answers = clients.load(address, PATH, bodies, args.clients, args.seconds, 1 / 3)
            seconds = time.perf_counter() - start
            growth, stats = memory.growth(), wait_until_free(address)
        metrics = figures(answers, seconds, growth)
        details = {
            "row": f"{describe(llm, args)}: {args.clients} clients for {args.seconds:g} s, a third "
            "of the answers abandoned, all others equal to those alone",
            "show": [key for key in metrics if key != "tokens_per_second"],
            "prompts": len(bodies),
            "prompts_left_out": len(made) - len(bodies),
            "kv_blocks": stats["kv_blocks"],
        }
    found = problems(answers, expected, stats, growth)
    if found:
        print({key: round(value.median, 2) for key, value in metrics.items()})
        raise SystemExit("; ".join(found))
    write_record("server-load", details, metrics, None, args.out)


if __name__ == "__main__":
    main()
