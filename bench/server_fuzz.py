"""Malformed requests to `overspill serve`: no status of 500 or more, no crash, no leak.

    python3 bench/server_fuzz.py
    python3 bench/server_fuzz.py --requests 500 --out fuzz
    python3 bench/server_fuzz.py --only 4711

Requests are truncated, slow, oversized, of wrong types, not UTF-8, not HTTP or abandoned;
tests/server/malformed.py makes each from its number. The server is a process of its own with a tiny
model on the CPU. Between the requests a good one must get its right answer. The record is
`server-fuzz`.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.record import ROOT, Metric, write_record
from tests.server.malformed import case_of
from tests.server.model import save_model
from tests.server.send import Outcome, send_all

_ROUNDS = 10
_WARM = 2
"""Rounds after which the server's memory must not grow any more."""
_GROWTH = 16.0
"""MiB that count as flat: less than two of a thousand of such requests' bodies."""
_FLAGS = (
    "--port", "0", "--device", "cpu", "--json", "--context", "128", "--max-batch", "8",
    "--max-body", "64KiB", "--body-timeout", "1", "--request-timeout", "60",
)  # fmt: skip


class Target:
    """The server that is fuzzed."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        model = save_model(folder / "tiny")
        paths = os.pathsep.join((str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "overspill", "serve", str(model), *_FLAGS],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
        assert self.process.stdout is not None
        self.url = str(json.loads(self.process.stdout.readline())["url"])
        self.port = int(self.url.rpartition(":")[2])
        self.right = self.answer()

    def answer(self) -> str:
        """That of a good request."""
        body = {"prompt": "Hello", "max_tokens": 16, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/stats", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def wait_idle(self) -> bool:
        """Whether nothing of any request is left, after a while."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            stats = self.stats()
            used = stats["kv_blocks"] - stats["kv_blocks_free"]
            if not (stats["in_flight"] or stats["running"] or stats["waiting"] or used):
                return True
            time.sleep(0.05)
        return False

    def memory(self) -> float:
        """MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first request")
    parser.add_argument("--only", type=int, help="send the request with this number and show it")
    parser.add_argument("--out", help="folder of the record; default: bench/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        try:
            if given.only is not None:
                print(case_of(given.only))
                print(asyncio.run(send_all(target.port, [given.only], 1)))
                print(target.log.read_text())
                return
            sys.exit(_fuzz(target, given))
        finally:
            target.process.kill()


def _fuzz(target: Target, given: argparse.Namespace) -> int:
    outcome, memory, began = Outcome(), [], time.monotonic()
    files = target.files()
    for round_ in range(_ROUNDS):
        first = given.seed + round_ * given.requests // _ROUNDS
        last = given.seed + (round_ + 1) * given.requests // _ROUNDS
        made = asyncio.run(send_all(target.port, range(first, last), given.clients))
        outcome.statuses += made.statuses
        outcome.kinds += made.kinds
        outcome.problems += made.problems
        if not target.wait_idle():
            outcome.problems.append(f"requests are left over: {target.stats()}")
        if target.answer() != target.right:
            outcome.problems.append("a good request got a wrong answer")
        memory.append(target.memory())
        print(f"{last - given.seed} requests, {memory[-1]:.0f} MiB, {dict(outcome.statuses)}")
    growth = memory[-1] - max(memory[:_WARM])
    if growth > _GROWTH:
        outcome.problems.append(f"the memory has grown by {growth:.1f} MiB: {memory}")
    if target.files() > files + 1:
        outcome.problems.append(f"{target.files()} files are open, {files} were")
    if (code := target.stop()) != 0:
        outcome.problems.append(f"the server ended with {code}")
    if "Traceback" in (log := target.log.read_text()):
        outcome.problems.append(f"the log has a traceback: {log[-2000:]}")
    for problem in outcome.problems[:50]:
        print(problem)
    _write(outcome, growth, time.monotonic() - began, given)
    return 1 if outcome.problems else 0


def _write(outcome: Outcome, growth: float, seconds: float, given: argparse.Namespace) -> None:
    def count(value: float, unit: str) -> Metric:
        return Metric(value, value, value, unit)

    metrics = {
        "malformed requests": count(sum(outcome.kinds.values()), "requests"),
        "problems": count(len(outcome.problems), "problems"),
        "status 500 and above": count(
            sum(n for status, n in outcome.statuses.items() if status >= 500), "answers"
        ),
        "memory growth": count(round(growth, 1), "MiB"),
        "time": count(round(seconds), "s"),
    }
    config = {
        "row": "malformed requests to overspill serve",
        "show": list(metrics)[1:],
        "kinds": dict(outcome.kinds.most_common()),
        "statuses": {str(status): n for status, n in outcome.statuses.most_common()},
        "seed": given.seed,
        "clients": given.clients,
    }
    write_record("server-fuzz", config, metrics, limit=None, out=given.out)


if __name__ == "__main__":
    main()
