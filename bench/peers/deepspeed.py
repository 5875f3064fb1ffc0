"""W1 trained by Overspill and by DeepSpeed ZeRO-3 offload, in turn, on the same machine.

PYTHONPATH=src python3 bench/peers/deepspeed.py --peer-path FOLDER_WITH_DEEPSPEED

Host memory holds only one of the two at a time. So this process starts a child process for each
side of each round: Overspill, DeepSpeed, Overspill, DeepSpeed. A child builds its model once and
measures every batch. A ratio compares the two sides of one round.
"""

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# bench/ instead of this folder, whose deepspeed.py hides the package of that name.
sys.path[0] = str(ROOT / "bench")

from peers.compare import compare, comparisons, metrics_of, table_of  # noqa: E402
from peers.measurement import Measurement, Options, from_line  # noqa: E402
from record import write_record  # noqa: E402
from train import save as save_run  # noqa: E402
from workload import SEQ, Run  # noqa: E402

from overspill.models.presets import get_preset  # noqa: E402

PEER = "deepspeed"
SIDES = ("overspill", PEER)
SHORTEST = 60.0  # seconds that a child needs at least; no child is started with less left


class Child(NamedTuple):
    side: str
    round: int
    options: Options


class Ended(NamedTuple):
    measured: list[Measurement]
    failure: str | None


def children(args: argparse.Namespace) -> list[Child]:
    """Children in the order of their runs: rounds with offloading, then one with everything on the
    GPU."""

    def options(side: str, mode: str, batches: list[int]) -> Options:
        # steps on the GPU are short, and one of the first few is slower on both sides
        more = 4 if mode == "gpu" else 0
        # our experts move to the GPU in the first steps with a batch
        moving = 6 if side != PEER and mode == "offload" and not args.tiny else 0
        return Options(mode, batches, args.warm + more + moving, args.steps + more, args.tiny)

    planned = [
        Child(side, number, options(side, "offload", args.batches))
        for number in range(args.rounds)
        for side in args.sides
    ]
    if args.gpu:
        planned += [Child(side, 0, options(side, "gpu", args.batches[:1])) for side in args.sides]
    return planned


def environment(child: Child, peer_path: Path | None) -> dict[str, str]:
    """DeepSpeed's site folder comes first and is seen by its own children only."""
    paths = [str(ROOT / "src"), str(ROOT / "bench")]
    variables = dict(os.environ)
    if child.side == PEER:
        if peer_path is not None:
            paths.insert(0, str(peer_path.resolve()))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        variables |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}  # one rank
        variables.setdefault("DS_SKIP_CUDA_CHECK", "1")  # nvcc and torch may differ in the minor
        if child.options.tiny:
            variables["DS_ACCELERATOR"] = "cpu"
    if child.options.tiny:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return {**variables, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def run_child(child: Child, run: str, args: argparse.Namespace, seconds: float) -> Ended:
    """Run a child to its end, or for `seconds`, and show its output; keep its measurements."""
    script = ROOT / "bench" / "peers" / f"run_{child.side}.py"
    process = subprocess.Popen(
        [sys.executable, "-P", str(script), *child.options.to_arguments()],
        env=environment(child, args.peer_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    deadline = threading.Timer(seconds, process.kill)
    deadline.start()
    measured = []
    try:
        for line in process.stdout:
            print(f"[{child.side}] {line}", end="", flush=True)
            found = from_line(line)
            if found is not None:
                measured.append(replace(found, run=run, round=child.round))
        status = process.wait()
    finally:
        deadline.cancel()
        process.kill()
    return Ended(measured, None if status == 0 else f"exit code {status}")


def run_all(args: argparse.Namespace, begun: float) -> tuple[list[Measurement], list[str]]:
    """Runs the children while time is left. Returns the measurements and the failures."""
    run = datetime.now(UTC).isoformat(timespec="seconds")
    measured: list[Measurement] = []
    failures: list[str] = []
    longest: dict[tuple[str, str], float] = {}
    for child in children(args):
        what = f"{child.side}, {child.options.mode}, round {child.round + 1}"
        kind = (child.side, child.options.mode)
        left = args.budget_s - (time.monotonic() - begun)
        if left < longest.get(kind, SHORTEST):
            print(f"{what}: not started, {left:.0f} s are left", flush=True)
            continue
        start = time.monotonic()
        ended = run_child(child, run, args, left)
        took = time.monotonic() - start
        longest[kind] = max(took, longest.get(kind, 0.0))
        print(f"{what}: {took:.0f} s, {len(ended.measured)} measurements", flush=True)
        measured += ended.measured
        if args.measurements is not None:
            with args.measurements.open("a") as file:
                file.writelines(one.to_line() + "\n" for one in ended.measured)
        if ended.failure is not None:
            failures.append(f"{what}: {ended.failure}")
    return measured, failures


def save(measured: list[Measurement], args: argparse.Namespace) -> bool:
    """Writes the record if the headline has been measured."""
    compared = [compare(measured, one, PEER) for one in comparisons(args.batches)]
    if not compared[0].ours:
        print("no record: the headline lacks a pair of measurements", file=sys.stderr)
        return False
    compared = [one for one in compared if one.ours]
    ours, theirs = compared[0].ours[0], compared[0].theirs[0]
    name = f"DeepSpeed {theirs.version}"
    details = {
        "row": f"{'A toy' if args.tiny else 'W1'}: Overspill and {name} in turn",
        "overspill": ours.settings,
        "deepspeed": theirs.settings,
        "deepspeed_version": theirs.version,
        "deepspeed_model": "MixtralForCausalLM, experts_implementation=grouped_mm",
        "dtype": "bf16 weights, fp32 master and moments, activations recomputed",
        "pairs": len(compared[0].ours),
        "warm": args.warm,
        "steps": args.steps,
    }
    record = "tiny-vs-deepspeed" if args.tiny else "train-w1-vs-deepspeed"
    table = table_of(compared, SEQ, name)
    for row in table:
        print("; ".join(f"{key}: {value}" for key, value in row.items()))
    write_record(record, details, metrics_of(compared, PEER), None, args.out, table)
    if not args.tiny:
        save_own(measured, args)
    return True


def save_own(measured: list[Measurement], args: argparse.Namespace) -> None:
    """Writes Overspill's side as the records of `bench/train.py`."""
    own = [one for one in measured if one.side == "overspill"]
    for work in dict.fromkeys(one.work for one in own):
        runs = [one for one in own if one.work == work]
        seconds = [each for one in runs for each in one.seconds]
        memory = [max(one.gpu_bytes for one in runs), max(one.host_bytes for one in runs)]
        run = Run(runs[0].tokens, seconds, runs[-1].loss, *memory, {}, runs[-1].on_gpu)
        given = {"preset": "w1", **runs[0].settings, "warm": args.warm, "steps": args.steps}
        save_run(get_preset("w1"), run, work.mode == "offload", work.clip, given, args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-path", type=Path, help="folder with the package deepspeed")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of children that offload")
    parser.add_argument("--gpu", action="store_true", help="also one pair fully on the GPU")
    parser.add_argument("--batches", default=None, help="sequences of 1024 tokens; default 16,64")
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--sides", default=",".join(SIDES), help="run only these sides")
    parser.add_argument("--measurements", type=Path, help="file of lines to continue from")
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    text = args.batches or ("1,2" if args.tiny else "16,64")
    args.batches = [int(batch) for batch in text.split(",")]
    args.sides = args.sides.split(",")
    if not set(args.sides) <= set(SIDES):
        parser.error(f"--sides {','.join(args.sides)}: choose from {','.join(SIDES)}")
    if args.tiny and args.out is None:
        parser.error("--tiny needs --out: its record is no result")
    return args


def main() -> int:
    begun = time.monotonic()
    args = parse()
    before: list[Measurement] = []
    if args.measurements is not None and args.measurements.exists():
        lines = args.measurements.read_text().splitlines()
        before = [one for one in map(from_line, lines) if one is not None]
    measured, failures = run_all(args, begun)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    saved = save(before + measured, args)
    return 1 if failures or not saved else 0


if __name__ == "__main__":
    sys.exit(main())
