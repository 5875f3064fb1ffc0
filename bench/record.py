"""Benchmark records: one JSON file per figure, with everything needed to repeat the measurement."""

import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


class Metric(NamedTuple):
    """A figure over several runs: median, lowest and highest value."""

    median: float
    low: float
    high: float
    unit: str


class Limit(NamedTuple):
    """The upper bound of the headline figure, in its unit, and its source."""

    value: float
    unit: str
    source: str


def metric(values: Sequence[float], unit: str) -> Metric:
    """The metric of `values`, one per run."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"a metric needs one or more values, all finite; got {list(values)}")
    return Metric(statistics.median(values), min(values), max(values), unit)


def write_record(
    name: str,
    config: Mapping[str, Any],
    metrics: Mapping[str, Metric],
    limit: Limit | None,
    out: Path | str | None = None,
    table: Sequence[Mapping[str, Any]] | None = None,
) -> Path:
    """Writes `<out or bench/results>/<name>.json`. The first metric is the headline.

    For `bench/tables.py`: `config["row"]` describes the work, `config["compare"]` a figure to
    compare with, `config["show"]` lists further metrics to show. A record with `table` gets a table
    of its own instead of one row in a common table; above it are `config["picture"]`, a file beside
    the page, if there is one, and with `config["show"]` the row too.
    """
    if re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", name) is None:
        raise ValueError(f"a record's name is like train-w1-16x1024, not {name!r}")
    if not metrics:
        raise ValueError(f"the record {name} has no metric; the first one is its headline")
    headline = next(iter(metrics.values()))
    if limit is not None and limit.unit != headline.unit:
        raise ValueError(f"the limit of {name} is in {limit.unit}, its headline in {headline.unit}")
    record: dict[str, Any] = {
        "name": name,
        "command": command(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "config": dict(config),
        "metrics": {key: value._asdict() for key, value in metrics.items()},
        "limit": None if limit is None else limit._asdict(),
    }
    if table is not None:
        record["table"] = [dict(row) for row in table]
    path = Path(out or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # allow_nan=False: JSON has no NaN
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    aside = path.with_suffix(".part")
    aside.write_text(text)
    os.replace(aside, path)
    print(f"{name}: {headline.median:,.4g} {headline.unit} → {path.name}")
    return path


def command() -> str:
    """The command that repeats this run from the root of a checkout."""
    script, *arguments = sys.argv
    typed = [_script(Path(script)), *(_without_root(argument) for argument in arguments)]
    return "PYTHONPATH=src python3 " + shlex.join(typed)


def _script(path: Path) -> str:
    """The path relative to the checkout: scripts are below bench/."""
    parts = path.absolute().parts
    if "bench" not in parts:
        return f"bench/{path.name}"
    below = parts[::-1].index("bench")
    return "/".join(parts[-1 - below :])


def _without_root(argument: str) -> str:
    """Makes paths in the checkout relative; of other absolute paths keeps the last component."""
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if path.is_absolute():
        value = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name or "."
    return option + equals + value


def commit() -> str:
    """The measured commit; a copy without git has it in the file COMMIT."""
    file = ROOT / "COMMIT"
    if file.is_file():
        return file.read_text().strip()
    if (ROOT / ".git").exists():
        git = ["git", "rev-parse", "--short", "HEAD"]
        try:
            return subprocess.run(
                git, cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass  # git is not installed, or there is no commit yet
    return "unknown"


def _cpu_ticks() -> tuple[int, int]:
    """Ticks that all cores have worked, and ticks taken by the host of a virtual machine."""
    file = Path("/proc/stat")
    if not file.is_file():
        return 0, 0
    numbers = [int(number) for number in file.read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _wait, interrupts, soft, stolen = numbers + [0] * (8 - len(numbers))
    return user + nice + system + interrupts + soft, stolen


_BEGIN = _cpu_ticks()


def _stolen() -> float:
    """The share of CPU time taken by the host since the benchmark started."""
    worked, stolen = (now - before for now, before in zip(_cpu_ticks(), _BEGIN, strict=True))
    return stolen / max(1, worked + stolen)


def hardware() -> dict[str, Any]:
    """GPU, CPU, memory and the CPU time taken by the host; nothing that identifies the machine."""
    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "gpu": gpu,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(ram / 2**30, 1),
        "stolen": round(_stolen(), 3),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        # imported instead of read from package metadata: the code may not be installed
        "overspill": getattr(import_module("overspill"), "__version__", None),
    }
    for package in ("transformers", "deepspeed"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
