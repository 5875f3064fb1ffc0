"""Training speed by GPU memory: as many experts live on the GPU as the budget allows.

PYTHONPATH=src python3 bench/residency.py --clip both --rounds 2
PYTHONPATH=src python3 bench/residency.py --preset moe-l --experts 24 --batch 32 --budgets 40 \
    --disk FOLDER
PYTHONPATH=src python3 bench/residency.py --plot-only  # docs/residency.png from the records

One process measures all budgets, the smallest first: a larger budget keeps the experts that are on
the GPU already. Each budget is a hard limit of the allocator. Steps are timed when the number of
experts on the GPU no longer changes.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, ROOT, metric, write_record
from residency_plot import draw_plot
from tables import read_records
from train import limit, metrics_of
from workload import SEQ, Run, Work, build, measure_steps, optimize, show, steps

import overspill
from overspill.core.errors import OverspillError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.presets import get_preset
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings

MAX_NORM = 1.0
MOST_STEPS = 20
"""Steps after which the timing begins although the number of experts on the GPU still changes."""
PLOT = ROOT / "docs" / "residency.png"


@dataclass(frozen=True)
class Case:
    """Setting of one record; the budget is in GiB. `experts` is None for the preset's number."""

    preset: str
    experts: int | None
    batch: int
    budget: float
    clip: bool

    @property
    def name(self) -> str:
        model = self.preset if self.experts is None else f"{self.preset}-{self.experts}"
        return f"residency-{model}-{self.budget:g}gib{'-clip' if self.clip else ''}"

    @property
    def row(self) -> str:
        model = self.preset if self.experts is None else f"{self.preset}, {self.experts} experts"
        clip = ", exact clipping" if self.clip else ""
        return f"{model}, {self.batch}×{SEQ} tokens a step, {self.budget:g} GiB{clip}"


@dataclass(frozen=True)
class Measured:
    """The timed steps of one round, and how many experts of each layer lived on the GPU."""

    run: Run
    residents: list[int]
    settled: bool


def settle(engine: Engine, run: Iterator[torch.Tensor], unchanged: int) -> bool:
    """Runs steps until so many of them have left the number of experts on the GPU unchanged;
    whether that was reached."""
    count = 0
    for _ in range(MOST_STEPS):
        before = sum(engine.residents)
        next(run)
        count = count + 1 if sum(engine.residents) == before else 0
        if count >= unchanged:
            return True
    return False


def measure_case(
    model: GPTMoE, optimizer: overspill.AdamW, case: Case, args: argparse.Namespace
) -> Measured:
    engine = model.overspill
    engine.memory.limit(int(case.budget * 2**30))
    run = steps(model, optimizer, Work(case.batch))
    settled = settle(engine, run, args.warm)
    if not settled:
        print(f"{case.name}: residents still change after {MOST_STEPS} steps", file=sys.stderr)
    timeline = None
    if args.timeline is not None and case.budget == args.timeline_at:
        timeline = args.timeline / case.name
    timed = measure_steps(engine, run, case.batch * SEQ, 0, args.steps, timeline, title=case.row)
    show(f"{case.name}, {sum(engine.residents)} experts on the GPU", timed)
    return Measured(timed, engine.residents, settled)


def measure_round(
    model: GPTMoE, cases: Sequence[Case], residents: Sequence[int], args: argparse.Namespace
) -> Iterator[tuple[Case, Measured | None]]:
    """Measures cases of growing budgets with a new optimizer. They begin with `residents`
    of each layer. None for a case that failed."""
    engine = model.overspill
    engine.set_residents(residents)  # an optimizer that clips needs memory for each
    optimizer = optimize(model, MAX_NORM if cases[0].clip else None)
    for case in cases:
        measured = None
        try:
            measured = measure_case(model, optimizer, case, args)
        except (torch.OutOfMemoryError, OverspillError) as error:
            print(f"{case.name} failed: {error}", file=sys.stderr, flush=True)
        if measured is None:  # here the failed step and its memory are gone
            engine.training.discard()
            optimizer.zero_grad()
            engine.set_residents(residents)
        yield case, measured


def save(
    config: GPTConfig,
    case: Case,
    rounds: Sequence[Measured],
    given: Mapping[str, Any],
    out: Path | None,
) -> None:
    """Writes the record of a case; `given` are the arguments it was measured with."""
    runs = [one.run for one in rounds]
    experts = config.n_moe_layers * config.n_experts
    shares = [sum(one.residents) / experts for one in rounds]
    metrics = metrics_of(config, runs)
    metrics["experts_on_gpu"] = metric([100 * share for share in shares], "%")
    streamed = round((1 - max(shares)) * config.expert_params)
    details = {
        "row": case.row,
        "show": ["gpu_memory", "experts_on_gpu", "host_memory"],
        **given,
        "gpu_memory": f"{case.budget:g}GiB",
        "max_grad_norm": MAX_NORM if case.clip else None,
        "rounds": len(rounds),
        "residents": rounds[-1].residents,
        "settled": all(one.settled for one in rounds),
        "expert_parameters": config.expert_params,
        "parameters": config.total_params,
        "dtype": "bf16 weights, fp32 master and moments",
    }
    write_record(case.name, details, metrics, limit(config, runs[0].tokens, streamed), out)


def measure_all(args: argparse.Namespace) -> bool:
    """Measures every case in every round; whether none failed. A record is written after each
    measurement, so that an interrupted benchmark keeps its results."""
    changes = {} if args.experts is None else {"n_experts": args.experts}
    config = get_preset(args.preset, max_seq=SEQ, **changes)
    model = build(
        config,
        Settings(residency=True),
        args.device,
        gpu_memory=int(args.budgets[0] * 2**30),
        disk=args.disk,
        keep_gradients=False if args.clip == "no" else None,
    )
    given = {key: getattr(args, key) for key in ("preset", "batch", "warm", "steps")}
    residents = (
        model.overspill.residents
    )  # experts that host memory does not hold are there from the start
    found: dict[Case, list[Measured]] = {}
    complete = True
    for _ in range(args.rounds):
        for clip in {"no": [False], "yes": [True], "both": [False, True]}[args.clip]:
            cases = [
                Case(args.preset, args.experts, args.batch, budget, clip) for budget in args.budgets
            ]
            for case, measured in measure_round(model, cases, residents, args):
                if measured is None:
                    complete = False
                    continue
                found.setdefault(case, []).append(measured)
                save(config, case, found[case], given, args.out)
    model.overspill.close()
    return complete


def plot(path: Path, out: Path | None) -> None:
    """Draws the records of bench/results, and those of `out` in place of records there."""
    folders = [RESULTS] if out is None else [RESULTS, out]
    records = {record["name"]: record for folder in folders for record in read_records(folder)}
    draw_plot(list(records.values()), path)


def budgets(text: str) -> list[float]:
    """GiB in growing order."""
    values = sorted({float(word) for word in text.split(",")})
    if values[0] <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be sizes in GiB above 0")
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="w1")
    parser.add_argument("--experts", type=int, default=None, help="experts in each layer")
    parser.add_argument("--budgets", type=budgets, default="12,24,40,52,60", help="in GiB")
    parser.add_argument("--batch", type=int, default=16, help=f"sequences of {SEQ} tokens a step")
    parser.add_argument("--clip", default="no", choices=("no", "yes", "both"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--warm",
        type=int,
        default=6,
        help="steps with unchanged residents before those that are timed",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeline", type=Path, default=None, help="folder for timelines")
    parser.add_argument("--timeline-at", type=float, default=24, help="its budget in GiB")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="draw the plot to this file")
    parser.add_argument("--plot-only", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.timeline is not None and args.timeline_at not in args.budgets:
        parser.error(f"--timeline-at {args.timeline_at:g} is not one of --budgets")
    complete = args.plot_only or measure_all(args)
    if args.plot_only or args.plot is not None:
        plot(args.plot or PLOT, args.out)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
