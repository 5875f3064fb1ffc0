"""Random training programs on offloaded models, compared with plain PyTorch.

    python3 bench/fuzz.py --minutes 60 --processes 2
    python3 bench/fuzz.py --minutes 10 --device cuda --processes 4
    python3 bench/fuzz.py --program 4711

Each program trains a tiny model with random settings: forward, backward, accumulation, steps,
freezing, state dicts, checkpoints, inference, with failing and interrupted transfers, updates and
file operations. tests/fuzz has the parts. A failure is printed with the seed that repeats it. The
record is `fuzz-programs`, or `fuzz-programs-cuda`.
"""

import argparse
import faulthandler
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.record import Metric, write_record
from tests.fuzz.program import FAULTS, program_of
from tests.fuzz.run import LIMIT, Report, fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first program")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--program", type=int, help="run this program alone and show it")
    parser.add_argument("--ops", help="of --program: only these operations, such as 0,3,4")
    parser.add_argument("--out", help="folder of the record; default: bench/results")
    given = parser.parse_args()
    if given.program is not None:
        sys.exit(_one(given.program, given.ops, given.device))
    report = fuzz(given.seed, 60 * given.minutes, given.device, given.processes)
    print(report)
    _write(report, given)
    sys.exit(1 if report.failures else 0)


def _one(seed: int, ops: str | None, device: str) -> int:
    """Runs one program and shows it; 1 if it fails."""
    import torch

    from tests.fuzz.execute import execute

    torch.set_num_threads(1)
    program = program_of(seed)
    if ops is not None:
        program = program.with_ops([int(number) for number in ops.split(",")])
    print(program.case)
    for number, op in enumerate(program.ops):
        print(f"{number:3}  {op}")
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    outcome = execute(program, device)
    print(outcome)
    return int(outcome.failure is not None)


def _write(report: Report, given: argparse.Namespace) -> None:
    def count(value: int, unit: str) -> Metric:
        return Metric(value, value, value, unit)

    metrics = {"programs": count(report.programs, "programs")}
    metrics["operations"] = count(report.counts["operations"], "operations")
    metrics["refused"] = count(report.counts["refused"], "operations")
    for kind in FAULTS:
        number = sum(n for name, n in report.faults.items() if name.startswith(kind))
        metrics[f"faults, {kind}"] = count(number, "faults")
    metrics["differences"] = count(report.failed("difference"), "programs")
    metrics["hangs"] = count(report.failed("hang"), "programs")
    metrics["leftover threads and files"] = count(report.failed("left over"), "programs")
    config = {
        "row": f"random programs compared with plain PyTorch, {given.device}",
        "show": list(metrics)[1:],
        "minutes": given.minutes,
        "seed": given.seed,
        "processes": given.processes,
    }
    name = "fuzz-programs" if given.device == "cpu" else f"fuzz-programs-{given.device}"
    write_record(name, config, metrics, limit=None, out=given.out)


if __name__ == "__main__":
    main()
