"""Throughput through the server over that of `llm.generate`, with one request and with 16.

PYTHONPATH=src python3 bench/server_overhead.py

The rounds of both alternate. The clients stream, and run in a process of their own.
"""

import argparse
import time
from collections.abc import Sequence

from record import Limit, Metric, metric, write_record
from server_client import Answer, Clients
from server_host import NAME, add_flags, describe, open_llm, serving, warm_up

import overspill
from overspill.core.garbage import short_collections

PATH = "/v1/chat/completions"
SIZES = (1, 16)
_PROMPT = 8


def texts(size: int, number: int) -> list[str]:
    """Prompts that are not in the cache of keys and values."""
    first = 100 + 40 * (number % 8)
    return [
        " ".join(f"w{first + request + token}" for token in range(_PROMPT))
        for request in range(size)
    ]


def alone(llm: overspill.LLM, prompts: Sequence[str], tokens: int) -> tuple[float, list[str]]:
    """Tokens a second of `llm.generate`, and the answers."""
    params = overspill.SamplingParams(max_tokens=tokens)
    chats = [llm.chat_tokens([{"role": "user", "content": prompt}]) for prompt in prompts]
    start = time.perf_counter()
    results = llm.generate(chats, params)
    seconds = time.perf_counter() - start
    return sum(len(result.token_ids) for result in results) / seconds, [r.text for r in results]


def served(
    clients: Clients, address: tuple[str, int], prompts: Sequence[str], tokens: int
) -> tuple[float, list[Answer]]:
    bodies = [
        {
            "model": NAME, "messages": [{"role": "user", "content": prompt}], "stream": True,
            "temperature": 0, "max_tokens": tokens, "stream_options": {"include_usage": True},
        }
        for prompt in prompts
    ]  # fmt: skip
    answers = clients.at_once(address, PATH, bodies)
    failed = [answer.error for answer in answers if answer.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed; the first one: {failed[0]}")
    seconds = max(each.ended for each in answers) - min(each.began for each in answers)
    return sum(answer.tokens for answer in answers) / seconds, answers


def measure(
    llm: overspill.LLM, clients: Clients, address: tuple[str, int], args: argparse.Namespace
) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for size in SIZES:
        direct, through, waits = [], [], []
        for number in range(args.rounds + 1):
            prompts = texts(size, number)
            expected, _ = alone(llm, prompts, args.tokens)
            speed, answers = served(clients, address, prompts, args.tokens)
            print(f"{size}: {expected:,.0f} tokens/s alone, {speed:,.0f} served", flush=True)
            if number == 0:
                continue  # the first of each way to ask
            direct.append(expected)
            through.append(speed)
            waits += [1000 * answer.times[0] for answer in answers]
        shares = [100 * speed / most for speed, most in zip(through, direct, strict=True)]
        metrics |= {
            f"share_{size}": metric(shares, "%"),
            f"generate_{size}": metric(direct, "tokens/s"),
            f"server_{size}": metric(through, "tokens/s"),
            f"first_token_{size}": metric(waits, "ms"),
        }
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_flags(parser, "bfloat16")
    parser.add_argument("--tokens", type=int, default=800, help="of an answer")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    with open_llm(args) as llm:
        warm_up(llm, args.max_batch)
        with Clients() as clients, serving(llm, args.max_batch) as address, short_collections():
            metrics = measure(llm, clients, address, args)
        details = {
            "row": f"{describe(llm, args)}: one request through the server, over `llm.generate`",
            "show": [key for key in metrics if key != "share_1"],
            "tokens": args.tokens,
            "wanted": "at least 95%",
        }
    limit = Limit(100.0, "%", "llm.generate")
    write_record("server-overhead", details, metrics, limit, args.out)


if __name__ == "__main__":
    main()
