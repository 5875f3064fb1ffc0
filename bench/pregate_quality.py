"""Quality of pre-gates: perplexity and accuracy with N = 0 (a conventional model), 1, 2 and 3.

PYTHONPATH=src python3 bench/pregate_quality.py --data FOLDER --work FOLDER --measurements FILE
PYTHONPATH=src python3 bench/pregate_quality.py --plot-only  # docs/pregate-quality.png

For each seed a GPTMoE is trained on wikitext-2. This base is fine-tuned once for each N, on
wikitext-2 (perplexity) and on SST-2 (accuracy), with the same steps on the same batches. Pre-gates
that are not trained show what training is worth: they are put into the base, or into the fine-tuned
conventional model. All experts live on the compute device.

The work can be divided into several calls with the same --work and --measurements: a call measures
what is missing, until --budget-s have passed, and writes the record of everything that is there.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from quality_models import AFTER, BEFORE, LEVELS, NOT_TRAINED, TINY, Base, Figure, Models, Tuning
from quality_plot import draw_plot
from quality_tasks import FILES, SST2, WIKITEXT
from record import RESULTS, ROOT, Metric, metric, write_record

RECORD = "pregate-quality"
PLOT = ROOT / "docs" / f"{RECORD}.png"
PARTS = (WIKITEXT, SST2)
STEPS, RATES = ("base_steps", "steps", "sst2_steps"), ("base_lr", "lr", "sst2_lr")
"""Settings that are also flags."""


@dataclass(frozen=True)
class Measurement:
    """One figure, a line of --measurements."""

    task: str
    seed: int
    figure: Figure
    settings: str
    """Digest of the settings."""

    @classmethod
    def of_line(cls, line: str) -> "Measurement":
        content = json.loads(line)
        return cls(**{**content, "figure": Figure(**content["figure"])})


class Clock:
    """Whether work fits into the time that is left, by the longest of its kind so far."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest: dict[str, float] = {}

    def allows(self, kind: str) -> bool:
        left = max(0.0, self._end - time.monotonic())
        if left > self._longest.get(kind, 0.0):
            return True
        print(f"{kind}: not started, {left:.0f} s are left", flush=True)
        return False

    @contextmanager
    def timed(self, kind: str, what: str) -> Iterator[None]:
        print(what, flush=True)
        start = time.monotonic()
        yield
        took = time.monotonic() - start
        self._longest[kind] = max(took, self._longest.get(kind, 0.0))
        print(f"  {took:.1f} s", flush=True)


def measure(models: Models, args: argparse.Namespace, found: list[Measurement]) -> bool:
    """Add missing measurements to `found`; return whether there was time for all."""
    clock = Clock(args.budget_s)
    known = {(one.task, one.seed, one.figure.level) for one in found if one.figure.when == AFTER}
    wanted = [(part, seed, level) for part in args.parts for seed in args.seeds for level in LEVELS]
    for part, seed, level in wanted:
        if (part, seed, level) in known:
            continue
        if not models.base_file(seed).exists():
            if not clock.allows("base"):
                return False
            with clock.timed("base", f"base, seed {seed}"):
                models.train_base(seed)
        if not clock.allows(part):
            return False
        with clock.timed(part, f"{part}, seed {seed}, N = {level}"):
            figures = list(models.finetune(part, seed, level))
        for figure in figures:
            print(f"  N = {figure.level}, {figure.when}: {figure.value:.4f}", flush=True)
        new = [Measurement(part, seed, figure, models.digest) for figure in figures]
        found += new
        if args.measurements is not None:
            with args.measurements.open("a") as lines:
                lines.writelines(json.dumps(asdict(one)) + "\n" for one in new)
    return True


class Results:
    """The figures of one task, of the seeds for which all are there."""

    def __init__(self, found: Sequence[Measurement], task: str) -> None:
        own = [one for one in found if one.task == task]
        kinds = {(level, when) for level in LEVELS for when in (BEFORE, AFTER)}
        kinds |= {(level, NOT_TRAINED) for level in LEVELS[1:]}
        by_seed: dict[int, dict[tuple[int, str], float]] = {}
        for one in own:
            figure = one.figure
            by_seed.setdefault(one.seed, {})[figure.level, figure.when] = figure.value
        self.by_seed = {
            seed: values for seed, values in sorted(by_seed.items()) if values.keys() >= kinds
        }

    def values(self, level: int, when: str) -> list[float]:
        """One value of each seed; none without measurements: N = 0 that was not trained."""
        return [one[level, when] for one in self.by_seed.values() if (level, when) in one]

    def increases(self, level: int) -> list[float]:
        """The percentage by which the figure after fine-tuning exceeds that of N = 0."""
        pairs = zip(self.values(level, AFTER), self.values(0, AFTER), strict=True)
        return [100 * (own / conventional - 1) for own, conventional in pairs]

    def metrics(self, name: str, unit: str) -> dict[str, Metric]:
        """The headline figures, after fine-tuning, come first."""
        return {
            f"{name}_n{level}" + ("" if when == AFTER else f"_{when.replace('-', '_')}"): metric(
                values, unit
            )
            for when in (AFTER, BEFORE, NOT_TRAINED)
            for level in LEVELS
            if (values := self.values(level, when))
        }

    def cells(self, level: int, name: str, form: str) -> dict[str, Any]:
        """Median, lowest and highest figure of a level, for a row of the table."""
        words = {
            AFTER: "fine-tuned",
            BEFORE: "before fine-tuning",
            NOT_TRAINED: "pre-gates put in after fine-tuning, not trained",
        }
        cells: dict[str, Any] = {}
        for when, word in words.items():
            values = self.values(level, when)
            cells[f"{name}, {word}"] = None if not values else _range(values, form)
        return cells


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(each(values), form) for each in (min, max))
    middle = format(statistics.median(values), form)
    return middle if low == high else f"{middle} ({low}–{high})"


def save(found: Sequence[Measurement], models: Models, args: argparse.Namespace) -> bool:
    """Writes the record of the seeds that are complete; False if there is none."""
    text, sentences = Results(found, WIKITEXT), Results(found, SST2)
    metrics: dict[str, Metric] = {}
    table: list[dict[str, Any]] = [{"N": str(level)} for level in LEVELS]
    if text.by_seed:
        metrics |= {
            f"perplexity_n{level}_increase": metric(text.increases(level), "%")
            for level in LEVELS[1:]
        }
        metrics |= text.metrics("perplexity", "perplexity")
        for row, level in zip(table, LEVELS, strict=True):
            row |= text.cells(level, "perplexity", ".2f")
            increase = _range(text.increases(level), "+.2f") + " %" if level else None
            row["perplexity, fine-tuned, against N = 0"] = increase
    if sentences.by_seed:
        metrics |= sentences.metrics("accuracy", "share")
        for row, level in zip(table, LEVELS, strict=True):
            row |= sentences.cells(level, "accuracy", ".1%")
    if not metrics:
        print("no record: no seed has all its measurements", file=sys.stderr)
        return False
    write_record(RECORD, details(models, text, sentences), metrics, None, args.out, table)
    return True


def details(models: Models, text: Results, sentences: Results) -> dict[str, Any]:
    base, tuning = models.base, models.tuning
    config = base.config()
    return {
        "row": f"GPTMoE with {config.total_params / 1e6:.0f} M parameters, "
        f"{base.active_params / 1e6:.0f} M of them active: {config.n_layers} layers, "
        f"{config.n_experts} experts, top {config.top_k}; {base.base_steps} steps of "
        f"{base.base_batch}×{base.seq_len} tokens of wikitext-2, then {tuning.steps} steps of "
        f"{tuning.batch}×{base.seq_len} on it, or {tuning.sst2_steps} steps of {tuning.sst2_batch} "
        f"sentences of SST-2; seeds: {len(text.by_seed)} and {len(sentences.by_seed)}",
        "compare": "Pre-gated MoE, Figure 13: N = 1 matches N = 0",
        **asdict(base),
        **asdict(tuning),
        "experts": 'all on the compute device (offload with mode="gpu")',
        "dtype": f"{str(models.dtype).removeprefix('torch.')} weights, fp32 master and moments",
        "optimizer": "AdamW, betas 0.9 and 0.95, decay 0.1, gradient norm at most 1",
        "tokenizer": f"byte-level BPE of {base.vocab} tokens, trained on the training text",
        "perplexity": "per token of the validation text, in windows without earlier context",
        "accuracy": "of test.tsv.gz, the development set of GLUE",
        "seeds": {WIKITEXT: list(text.by_seed), SST2: list(sentences.by_seed)},
    }


def plot(path: Path, out: Path | None) -> None:
    """Draws the record in `out`, or that of bench/results."""
    file = (out or RESULTS) / f"{RECORD}.json"
    if not file.is_file():
        raise SystemExit(f"there is no record {file.name} in {file.parent}; measure it first")
    draw_plot(json.loads(file.read_text()), path)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def seeds(text: str) -> list[int]:
    return list(dict.fromkeys(int(word) for word in text.split(",")))


def parse() -> argparse.Namespace:
    files = [name for names in FILES.values() for name in names]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help=f"folder with {', '.join(files)}")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to fine-tune on")
    parser.add_argument("--seeds", type=seeds, default="0,1,2")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="starts nothing after that")
    parser.add_argument("--measurements", type=Path, help="file of lines to continue from")
    parser.add_argument("--work", type=Path, help="folder of trained models for later calls")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a toy that learns nothing")
    for name in STEPS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive)
    for name in RATES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="draw the picture to this file")
    parser.add_argument("--plot-only", action="store_true", help="measure nothing")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if not set(args.parts) <= set(PARTS):
        parser.error(f"--parts {','.join(args.parts)}: choose from {','.join(PARTS)}")
    if args.plot_only:
        return args
    if args.data is None:
        parser.error("--data is missing; give the folder of wikitext-2 and sst2")
    needed = [name for part in {WIKITEXT, *args.parts} for name in FILES[part]]
    if missing := [name for name in needed if not (args.data / name).is_file()]:
        parser.error(f"--data {args.data} has no {', '.join(missing)}")
    if args.tiny and args.out is None:
        parser.error("--tiny needs --out: its record is no result")
    return args


def settings(args: argparse.Namespace) -> tuple[Base, Tuning]:
    """The settings of the size, changed by the flags."""
    base, tuning = TINY if args.tiny else (Base(), Tuning())
    given = {name: value for name in STEPS + RATES if (value := getattr(args, name)) is not None}
    own = {field.name for field in fields(Base)}
    return (
        replace(base, **{name: value for name, value in given.items() if name in own}),
        replace(tuning, **{name: value for name, value in given.items() if name not in own}),
    )


def read(file: Path | None, digest: str) -> list[Measurement]:
    """The measurements of earlier calls."""
    if file is None or not file.exists():
        return []
    found = [Measurement.of_line(line) for line in file.read_text().splitlines()]
    if any(one.settings != digest for one in found):
        raise SystemExit(
            f"--measurements {file} was measured with other settings or on another kind of device; "
            "give the same flags, or another file"
        )
    return found


def main() -> int:
    args = parse()
    if args.tiny:
        torch.set_num_threads(1)  # tiny tensors gain nothing from more
    complete = args.plot_only or run(args)
    if args.plot_only or args.plot is not None:
        plot(args.plot or PLOT, args.out)
    return 0 if complete else 1


def run(args: argparse.Namespace) -> bool:
    """Measures and writes the record; whether everything that was asked for is in it."""
    with tempfile.TemporaryDirectory() as own:
        work = args.work or Path(own)
        work.mkdir(parents=True, exist_ok=True)
        if args.measurements is not None:  # now, not after the first training
            args.measurements.parent.mkdir(parents=True, exist_ok=True)
        models = Models(*settings(args), args.data, work, args.device)
        found = read(args.measurements, models.digest)
        complete = measure(models, args, found)
    return save(found, models, args) and complete


if __name__ == "__main__":
    sys.exit(main())
