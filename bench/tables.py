"""Makes the tables of README.md and the docs from the records in bench/results.

A table is between `<!-- bench:NAME start -->` and `<!-- bench:NAME end -->`. It shows the records
whose name is NAME or starts with NAME and a dash. A record that fits several names of a file is
shown under the longest of them only. The names `summary` and `overview` show the records of SUMMARY
and of OVERVIEW, a row each, `headline` the figures of HEADLINE with their words, and `limits` the
records of LIMITS as ratios to another row of their tables. `packed` shows the records of PACKED,
which no other marker of the file shows then.

    python3 bench/tables.py --write README.md docs/benchmarks.md   # warns about outdated records
    python3 bench/tables.py --check README.md        # exit code 1 if a table is out of date
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
_MARKED = re.compile(
    r"(<!-- bench:(?P<name>[a-z0-9.-]+) start -->\n).*?(<!-- bench:(?P=name) end -->)", re.DOTALL
)
_MARKER = re.compile(r"<!-- bench:.*?-->")
_NOTED = 0.01  # steal time below this share is not mentioned

HEADLINE = {
    "residency-w1-5gib": "training W1 in 5 GiB of GPU memory",
    "train-w1-vs-deepspeed": "the speed of DeepSpeed ZeRO-3 offload on W1, in less memory",
    "serve-30b-24gib-4bit": "generating with Qwen3-30B-A3B in 4 bits, in 24 GiB; in bf16: 48",
}
"""Records whose figure is at the top of the README, with words for it."""
SUMMARY = (
    "train-w1-16x1024",
    "train-w1-gpu-only-16x1024",
    "train-hf-w1-16x1024",
    "qlora-30b",
    "serve-w2-quarter-random",
)
OVERVIEW = (
    "train-w1-16x1024",
    "train-w1-16x1024-clip",
    "train-w1-64x1024",
    "train-w1-64x1024-clip",
    "train-w1-gpu-only-16x1024",
    "residency-w1-5gib",
    "residency-w1-24gib",
    "residency-w1-40gib",
    "residency-moe-l-24-40gib",
    "train-hf-w1-16x1024",
    "dense-offload-mixtral",
    "train-w1-vs-deepspeed",
    "lora-experts-30b",
    "qlora-30b",
    "serve-w2-gpu",
    "serve-w2-none",
    "serve-w2-quarter-random",
    "serve-w2-prefill",
    "serve-mixtral-6",
    "serve-30b-24gib-4bit",
    "serve-qwen35-24gib-4bit",
    "split-frozen-g0.4",
    "load-30gb",
)
"""Records of the tables, in their order. Missing records are left out."""
LIMITS = (
    ("pregate-switch-64", "gpu-only"),
    ("pregate-switch-128", "gpu-only"),
    ("pregate-ssd", "on-demand"),
    ("switch-large", "on-demand"),
    ("switch-large-ssd", "on-demand"),
    ("serve-nllb", "on-demand"),
    ("serve-nllb-ssd", "on-demand"),
)
"""Records of the table `limits`, and the mode that each is compared with."""
PACKED = (
    "serve-30b-24gib-4bit",
    "serve-w2-gpu-4bit",
    "serve-w2-none-4bit",
    "serve-w2-fp8",
    "serve-gpt-oss-120b",
    "serve-gpt-oss-120b-ssd",
    "prefill-30b-4bit",
    "load-gpt-oss-120b",
    "cpu-packed",
)
"""Records of the table `packed`, in their order. The table names missing ones."""
_MEMORY = {"gpu_memory": "GPU", "host_memory": "host", "peak": "host"}
"""Metrics that the summary shows as memory."""


def read_records(folder: Path) -> list[Record]:
    """All records, sorted by name; numbers in names are sorted by value: 8, 16, 64."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(records, key=lambda record: _counting_order(record["name"]))


def _counting_order(name: str) -> list[tuple[int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def fill(text: str, records: Sequence[Record]) -> str:
    """`text` with new content between each pair of markers."""
    if len(_MARKER.findall(text)) != 2 * len(_MARKED.findall(text)):
        raise ValueError("each <!-- bench:NAME start --> needs its <!-- bench:NAME end -->")

    names = [match["name"] for match in _MARKED.finditer(text)]

    def home(record: Record) -> str | None:
        if "packed" in names and record["name"] in PACKED:
            return "packed"
        fitting = [name for name in names if f"{record['name']}-".startswith(f"{name}-")]
        return max(fitting, key=len, default=None)

    def table(match: re.Match[str]) -> str:
        if match["name"] == "headline":
            content = headline(records)
        elif match["name"] == "limits":
            content = limits(records)
        elif match["name"] == "packed":
            content = packed(records)
        elif match["name"] in ("summary", "overview"):
            content = summary(records, SUMMARY if match["name"] == "summary" else OVERVIEW)
        else:
            content = render([one for one in records if home(one) == match["name"]])
        return f"{match[1]}\n{content}\n\n{match[3]}"

    return _MARKED.sub(table, text)


def headline(records: Sequence[Record]) -> str:
    """A column for each figure of HEADLINE, with its words below."""
    by_name = {record["name"]: record for record in records}
    chosen = [by_name[name] for name in HEADLINE if name in by_name]
    if not chosen:
        return "*Not measured yet.*"
    row = {}
    for record in chosen:
        first = next(iter(record["metrics"].values()))
        row[f"{_number(first['median'])} {first['unit']}"] = HEADLINE[record["name"]]
    return f"{_markdown([row])}\n\n{_measured_on(chosen)}"


def summary(records: Sequence[Record], names: Sequence[str]) -> str:
    """The records with these names, with date and commit in their rows."""
    by_name = {record["name"]: record for record in records}
    chosen = [by_name[name] for name in names if name in by_name]
    if not chosen:
        return "*Not measured yet.*"
    rows = []
    for record in chosen:
        metrics = record["metrics"]
        memory = [
            f"{word} {_figure(metrics[key])}" for key, word in _MEMORY.items() if key in metrics
        ]
        first = record.get("table", [{}])[0]  # of the rows of such a record, the headline
        row = {
            "work": ", ".join(filter(None, [_label(record), first.get("work")])),
            "figure (low–high)": _figure(next(iter(metrics.values()))),
            "memory": ", ".join(memory),
            "compare": record["config"].get("compare", ""),
            "measured": _when(record),
        }
        rows.append(row)
    return f"{_markdown(rows)}\n\n{_measured_on(chosen, when=False)}"


def packed(records: Sequence[Record]) -> str:
    """The records of PACKED in their order, and the names of missing ones."""
    by_name = {record["name"]: record for record in records}
    text = render([by_name[name] for name in PACKED if name in by_name])
    missing = [f"`{name}`" for name in PACKED if name not in by_name]
    if by_name.keys() & set(PACKED) and missing:
        text += f"\n\n*Not measured yet: {', '.join(missing)}.*"
    return text


def limits(records: Sequence[Record]) -> str:
    """The headlines of LIMITS and their limits, both divided by the figure of another mode."""
    by_name = {record["name"]: record for record in records}
    chosen = [(by_name[name], mode) for name, mode in LIMITS if name in by_name]
    if not chosen:
        return "*Not measured yet.*"
    rows = []
    for record, mode in chosen:
        headline, limit = next(iter(record["metrics"].values())), record["limit"]
        (other,) = [row[limit["unit"]] for row in record["table"] if row["mode"] == mode]
        most = f"{_number(limit['value'] / other)} times ({limit['source']})"
        row = {
            "work": _label(record),
            "against": mode,
            "figure": f"{_number(headline['median'] / other)} times",
            "limit, and share of it": f"{most}: {headline['median'] / limit['value']:.0%}",
            "compare": record["config"].get("compare", ""),
        }
        rows.append(row)
    return f"{_markdown(rows)}\n\n{_measured_on([record for record, _ in chosen])}"


def render(records: Sequence[Record]) -> str:
    """One table of all records without a `table`, then one for each that has one, below its figures
    if it says which ones to show."""
    if not records:
        return "*Not measured yet.*"
    lines = [record for record in records if "table" not in record]
    blocks = [_lines(lines), _commands(lines), _measured_on(lines)] if lines else []
    for record in records:
        if "table" in record:
            heading = f"**{_label(record)}** (`{record['command']}`)"
            picture = record["config"].get("picture")
            blocks += [heading, *([f"![{_label(record)}]({picture})"] if picture else [])]
            if "show" in record["config"]:
                blocks.append(_lines([record]))
            blocks += [_markdown(record["table"]), _measured_on([record])]
    return "\n\n".join(blocks)


def _lines(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        config = record["config"]
        headline = next(iter(record["metrics"].values()))
        others = [
            f"{key.replace('_', ' ')} {_figure(record['metrics'][key])}"
            for key in config.get("show", ())
        ]
        row = {
            "work": _label(record),
            "figure (low–high)": _figure(headline),
            "other figures": "; ".join(others),
            "limit, and share of it": _share(headline, record["limit"]),
            "compare": config.get("compare", ""),
        }
        rows.append(row)
    # columns that are empty in all rows are left out
    filled = [key for key in rows[0] if any(row[key] for row in rows)]
    return _markdown([{key: row[key] for key in filled} for row in rows])


def _commands(records: Sequence[Record]) -> str:
    """Listed once below the table, because most records of a group have the same command."""
    commands = dict.fromkeys(record["command"] for record in records)
    return "\n".join(["```bash", *commands, "```"])


def _label(record: Record) -> str:
    return str(record["config"].get("row", record["name"]))


def _figure(metric: Record) -> str:
    text = f"{_number(metric['median'])} {metric['unit']}"
    if metric["low"] == metric["high"]:
        return text
    return f"{text} ({_number(metric['low'])}–{_number(metric['high'])})"


def _share(headline: Record, limit: Record | None) -> str:
    if limit is None:
        return ""
    share = f"{headline['median'] / limit['value']:.0%}"
    return f"{_number(limit['value'])} {limit['unit']} ({limit['source']}): {share}"


def _number(value: float) -> str:
    """Three significant digits at least, whole numbers in full: 43,120; 17.7; 0.0412."""
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def _measured_on(records: Iterable[Record], when: bool = True) -> str:
    """The machines and versions, each once; with `when` also dates and commits."""
    measured: dict[str, set[str]] = {}
    for record in records:
        hardware, versions = record["hardware"], record["versions"]
        gpu = hardware["gpu"]
        parts = [f"{gpu['name']} ({gpu['memory_gib']:.0f} GiB)"] if gpu else []
        parts += [f"{hardware['cores']} cores of {hardware['cpu']}"]
        parts += [f"{hardware['ram_gib']:.0f} GiB RAM", f"torch {versions['torch']}"]
        measured.setdefault(", ".join(parts), set()).add(_when(record))
    return "\n".join(
        f"<sub>Measured on {machine}{'; ' + ', '.join(sorted(whens)) if when else ''}.</sub>"
        for machine, whens in measured.items()
    )


def _when(record: Record) -> str:
    text = f"{record['date'][:10]} at {record['commit']}"
    stolen = record["hardware"].get("stolen", 0)  # older records do not have it
    return f"{text} (steal time {stolen:.0%})" if stolen >= _NOTED else text


def _markdown(rows: Sequence[Record]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    text = _number(value) if isinstance(value, int | float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def outdated(records: Iterable[Record], root: Path) -> Iterator[str]:
    """A warning for each record whose commit is unknown or since which src/ has changed."""
    changes = cache(lambda commit: _changes_since(commit, root))
    for record in records:
        count = changes(record["commit"])
        if count is None:
            yield f"{record['name']}: measured at commit {record['commit']}, which is unknown here"
        elif count > 0:
            yield f"{record['name']}: src has changed since {record['commit']} (commits: {count})"


def _changes_since(commit: str, root: Path) -> int | None:
    """How many commits since `commit` changed src/; None if git does not know it."""
    git = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", "src"]
    try:
        done = subprocess.run(git, cwd=root, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", nargs="+", metavar="FILE", help="update the tables of these files")
    what.add_argument(
        "--check", nargs="+", metavar="FILE", help="exit code 1 if a table is out of date"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    options = parser.parse_args(arguments)
    records = read_records(options.results)
    if options.write:
        for warning in outdated(records, ROOT):
            print(f"warning: {warning}", file=sys.stderr)
    changed = False
    for file in map(Path, options.write or options.check):
        try:
            old = file.read_text()
            new = fill(old, records)
        except (OSError, ValueError) as error:
            parser.error(f"{file}: {error}")  # exit code 2
        if new == old:
            continue
        changed = True
        if options.write:
            file.write_text(new)
            print(f"{file}: tables written")
        else:
            print(f"{file}: tables are out of date; run make tables", file=sys.stderr)
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
