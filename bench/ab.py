"""Compares two versions of this repository on one machine: ratios with intervals.

OLD and NEW are folders of checkouts or git revisions. Each chosen benchmark (`bench/ab_work.py`)
runs in new processes, old and new alternating. A ratio above 1 means that the new version is
faster; its interval is that of the median of the pairs' ratios (bootstrap, 90%). Beside it are
the medians of the host's time, of synchronizations and of copied bytes, per step or token.

PYTHONPATH=src python3 bench/ab.py HEAD~20 . --only train-12 decode-quarter --pairs 12
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ab_work import WORKS
from record import ROOT, Metric, write_record

_DRAWS = 10_000
_SHARE = 0.90
_FURTHER = {"host": ("ms", 1e3), "syncs": ("", 1.0), "bytes": ("MB", 1e-6)}
"""Unit and scale of the figures beside the ratio."""


class Ratio(NamedTuple):
    """The median of ratios, and the ends of its interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def ratio_of(old: Sequence[float], new: Sequence[float]) -> Ratio:
    """How many times as fast the new version is, from the seconds of pairs."""
    ratios = [before / after for before, after in zip(old, new, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    cut = round((1 - _SHARE) / 2 * _DRAWS)
    return Ratio(statistics.median(ratios), medians[cut], medians[-1 - cut])


@contextmanager
def checkout(version: str) -> Iterator[Path]:
    """The folder of a version; that of a revision exists within the block."""
    if (Path(version) / "src" / "overspill").is_dir():
        yield Path(version).resolve()
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), version], check=True)
        try:
            yield folder.resolve()
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def measure(name: str, version: Path, shared: Path, smoke: bool) -> dict[str, Any]:
    """One run of a benchmark with a version."""
    line = [sys.executable, str(ROOT / "bench" / "ab_work.py"), name, "--folder", str(shared)]
    environment = {**os.environ, "PYTHONPATH": str(version / "src")}
    done = subprocess.run(
        [*line, *(["--smoke"] if smoke else [])], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name} failed with {version}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["source"]) == version / "src", f"{name} has run {found['source']}"
    return found


def compare(name: str, versions: Sequence[Path], pairs: int, shared: Path, smoke: bool) -> "Row":
    """Alternating runs; every second pair begins with the new version."""
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for pair in range(pairs):
        for number in (0, 1) if pair % 2 == 0 else (1, 0):
            found[number].append(measure(name, versions[number], shared, smoke))
    seconds = [[run["seconds"] for run in runs] for runs in found]
    further: dict[str, tuple[float, float] | None] = {}
    for key in _FURTHER:
        old, new = ([run[key] for run in runs if run[key] is not None] for runs in found)
        further[key] = (statistics.median(old), statistics.median(new)) if old and new else None
    return Row(name, ratio_of(*seconds), further)


class Row(NamedTuple):
    """The result of a benchmark."""

    name: str
    speed: Ratio
    further: dict[str, tuple[float, float] | None]
    """Figures of the old and the new version."""

    def cells(self) -> dict[str, str]:
        found = {"benchmark": self.name, "speed, new over old": str(self.speed)}
        for key, (unit, scale) in _FURTHER.items():
            both = self.further[key]
            found[f"{key} ({unit})" if unit else key] = (
                "" if both is None else f"{both[0] * scale:,.3g} → {both[1] * scale:,.3g}"
            )
        return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", nargs="?", help="a folder or a git revision")
    parser.add_argument("new", nargs="?", default=".", help="the same; default: this folder")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--list", action="store_true", help="show the benchmarks")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--out", type=Path, help="folder for a record")
    parser.add_argument("--name", default="ab", help="of the record")
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(f"{name:16}{work}" for name, work in WORKS.items()))
        return
    if args.old is None:
        parser.error("give OLD, a folder or a git revision")
    rows = []
    with ExitStack() as stack:
        versions = [stack.enter_context(checkout(version)) for version in (args.old, args.new)]
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in args.only:
            rows.append(compare(name, versions, args.pairs, shared, args.smoke))
            cells = rows[-1].cells().items()
            print("; ".join(f"{key} {text}" for key, text in cells if text), flush=True)
    if args.out is not None:
        config = {"row": f"{args.new} over {args.old}", "pairs": args.pairs}
        metrics = {row.name.replace("-", "_"): Metric(*row.speed, "×") for row in rows}
        write_record(args.name, config, metrics, None, args.out, [row.cells() for row in rows])


if __name__ == "__main__":
    main()
