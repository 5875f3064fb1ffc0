"""Runs programs in worker processes: one that hangs ends its process and is counted.

`python -m tests.fuzz.run --seed 0` is a worker. It writes one line of JSON before and one after
each program.
"""

import argparse
import faulthandler
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 30.0
"""Seconds after which a program hangs."""
_SHRINK_SECONDS = 20.0


@dataclass
class Failure:
    seed: int
    kind: str
    """"difference", "left over" or "hang"."""
    text: str
    ops: list[int] | None = None
    """The operations of the shortest program that fails."""

    def __str__(self) -> str:
        again = f"--program {self.seed}"
        if self.ops is not None:
            again += f" --ops {','.join(map(str, self.ops))}"
        return f"{self.kind} in program {self.seed} (bench/fuzz.py {again}): {self.text}"


@dataclass
class Report:
    programs: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    """Operations, and what became of them."""
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def failed(self, kind: str) -> int:
        return sum(failure.kind == kind for failure in self.failures)

    def __str__(self) -> str:
        rate = self.programs / max(self.seconds, 1e-9)
        return (
            f"{self.programs} programs in {self.seconds:.0f} s ({rate:.1f} per second), "
            f"{self.counts['operations']} operations, {self.counts['refused']} refused, "
            f"{sum(self.faults.values())} faults, {self.counts['restored']} restored, "
            f"{self.counts['rebuilt']} rebuilt; {self.failed('difference')} differences, "
            f"{self.failed('hang')} hangs, {self.failed('left over')} left something over"
        )


# -- the supervisor ------------------------------------------------------------------------------


def fuzz(first: int, seconds: float, device: str = "cpu", processes: int = 1) -> Report:
    """Runs the programs of the seeds from `first` on. Each failure is printed when it is found."""
    report, lock = Report(), threading.Lock()
    began = time.monotonic()
    deadline = began + seconds
    threads = [
        threading.Thread(
            target=_supervise, args=(first + i, processes, deadline, device, report, lock)
        )
        for i in range(processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.seconds = time.monotonic() - began
    return report


def _supervise(
    seed: int, stride: int, deadline: float, device: str, report: Report, lock: threading.Lock
) -> None:
    """Keeps one worker running until the deadline."""
    while time.monotonic() < deadline:
        left = deadline - time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz.run", "--device", device]
        command += ["--seed", str(seed), "--stride", str(stride), "--seconds", f"{left:.1f}"]
        with tempfile.TemporaryFile("w+") as errors:
            started = _follow(command, errors, report, lock)
            if started is None:
                return
            errors.seek(0)
            text = errors.read()[-6000:]
        failure = Failure(started, "hang", f"the process ended\n{text}")
        with lock:
            report.failures.append(failure)
            print(failure, flush=True)
        seed = started + stride


def _follow(command: list[str], errors: Any, report: Report, lock: threading.Lock) -> int | None:
    """Reads what a worker writes until it ends. Returns the seed of a program that did not end."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment
    ) as worker:
        assert worker.stdout is not None
        started = read_lines(worker.stdout, report, lock)
    if worker.returncode and started is None:
        raise RuntimeError(f"a worker ended with {worker.returncode} outside of a program")
    return started


def read_lines(lines: Iterable[str], report: Report, lock: threading.Lock) -> int | None:
    """Adds what a worker has written. Returns the seed of a program that did not end."""
    started: int | None = None
    for line in lines:
        told = json.loads(line)
        if "started" in told:
            started = told["started"]
            continue
        started = None
        with lock:
            report.programs += 1
            report.counts.update(told["counts"])
            report.faults.update(told["faults"])
            if told["failure"] is not None:
                failure = Failure(told["seed"], told["kind"], told["failure"], told["ops"])
                report.failures.append(failure)
                print(failure, flush=True)
    return started


# -- the worker ----------------------------------------------------------------------------------


def _work(seeds: Iterable[int], seconds: float, device: str) -> None:
    import torch

    from tests.fuzz.execute import execute
    from tests.fuzz.program import program_of

    torch.set_num_threads(1)
    deadline = time.monotonic() + seconds
    gc.collect()
    gc.freeze()  # what was imported
    limit = 4 * LIMIT  # the first program imports and compiles
    for seed in seeds:
        if time.monotonic() >= deadline:
            break
        program = program_of(seed)
        print(json.dumps({"started": seed}), flush=True)
        faulthandler.dump_traceback_later(limit, exit=True)
        outcome = execute(program, device)
        limit = LIMIT
        failure, ops = outcome.failure, None
        if failure is not None:
            ops, failure = shrink(program, device, failure)
        faulthandler.cancel_dump_traceback_later()
        told = {
            "seed": seed,
            "kind": kind_of(failure),
            "failure": failure,
            "ops": ops,
            "counts": {
                "operations": outcome.operations,
                "refused": outcome.refused,
                "restored": outcome.restored,
                "rebuilt": outcome.rebuilt,
            },
            "faults": dict(outcome.faults),
        }
        print(json.dumps(told), flush=True)


def kind_of(failure: str | None) -> str | None:
    if failure is None:
        return None
    return "left over" if failure.startswith("left over") else "difference"


def shrink(program: Any, device: str, failure: str) -> tuple[list[int] | None, str]:
    """Leaves out operations as long as the program fails. None if it does not fail again."""
    from tests.fuzz.execute import execute

    kept, ops = list(range(len(program.ops))), None
    deadline = time.monotonic() + _SHRINK_SECONDS
    number = -1  # first all operations
    while number < len(kept) and time.monotonic() < deadline:
        candidate = kept if number < 0 else kept[:number] + kept[number + 1 :]
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        outcome = execute(program.with_ops(candidate), device)
        faulthandler.cancel_dump_traceback_later()  # the caller may be a test
        if outcome.failure is not None and kind_of(outcome.failure) == kind_of(failure):
            kept = ops = candidate
            failure = outcome.failure
            number += number < 0
        elif number < 0:
            break  # not reproducible
        else:
            number += 1
    return ops, failure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a worker of bench/fuzz.py")
    parser.add_argument("--seed", type=int, nargs="+", required=True)
    parser.add_argument("--stride", type=int, help="also seeds after these, so far apart")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    seeds = given.seed
    if given.stride is not None:
        seeds = itertools.chain(seeds, itertools.count(seeds[-1] + given.stride, given.stride))
    _work(seeds, given.seconds, given.device)


if __name__ == "__main__":
    main()
