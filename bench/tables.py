"""Writes the tables of README.md and the docs from the records in bench/results.

A table is between `<!-- bench:NAME start -->` and `<!-- bench:NAME end -->` and shows the
records whose name is NAME or starts with NAME and a dash. A record that matches several names of a
file is shown under the longest one only.

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
_MIN_STOLEN = 0.01  # share of the CPU time taken by the host from which it is shown


def read_records(folder: Path) -> list[Record]:
    """All records, in natural order of their names: 8, 16, 64."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(records, key=lambda record: _natural_order(record["name"]))


def _natural_order(name: str) -> list[tuple[int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def fill(text: str, records: Sequence[Record]) -> str:
    """Returns `text` with new content between each pair of markers."""
    if len(_MARKER.findall(text)) != 2 * len(_MARKED.findall(text)):
        raise ValueError("each <!-- bench:NAME start --> needs its <!-- bench:NAME end -->")

    names = [match["name"] for match in _MARKED.finditer(text)]

    def name_of(record: Record) -> str | None:
        matching = [name for name in names if f"{record['name']}-".startswith(f"{name}-")]
        return max(matching, key=len, default=None)

    def table(match: re.Match[str]) -> str:
        own = [record for record in records if name_of(record) == match["name"]]
        return f"{match[1]}\n{render(own)}\n\n{match[3]}"

    return _MARKED.sub(table, text)


def render(records: Sequence[Record]) -> str:
    """One table for all records without a `table`, then one for each record with a `table`."""
    if not records:
        return "*Not measured yet.*"
    lines = [record for record in records if "table" not in record]
    blocks = [_summary(lines), _commands(lines), _measured_on(lines)] if lines else []
    for record in records:
        if "table" in record:
            heading = f"**{_label(record)}** (`{record['command']}`)"
            blocks += [heading, _markdown(record["table"]), _measured_on([record])]
    return "\n\n".join(blocks)


def _summary(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        config = record["config"]
        headline = next(iter(record["metrics"].values()))
        beside = [
            f"{key.replace('_', ' ')} {_figure(record['metrics'][key])}"
            for key in config.get("show", ())
        ]
        row = {
            "work": _label(record),
            "figure (low–high)": _figure(headline),
            "beside it": "; ".join(beside),
            "limit, and share of it": _share(headline, record["limit"]),
            "compare": config.get("compare", ""),
        }
        rows.append(row)
    # columns that are empty in all records are omitted
    filled = [key for key in rows[0] if any(row[key] for row in rows)]
    return _markdown([{key: row[key] for key in filled} for row in rows])


def _commands(records: Sequence[Record]) -> str:
    """The distinct commands; most records of a group come from one command."""
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
    """At least three digits; integers in full: 43,120; 17.7; 0.0412."""
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def _measured_on(records: Iterable[Record]) -> str:
    """Machine and versions, each machine once, with commits and dates."""
    measured: dict[str, set[str]] = {}
    for record in records:
        hardware, versions = record["hardware"], record["versions"]
        gpu = hardware["gpu"]
        parts = [f"{gpu['name']} ({gpu['memory_gib']:.0f} GiB)"] if gpu else []
        parts += [f"{hardware['cores']} cores of {hardware['cpu']}"]
        parts += [f"{hardware['ram_gib']:.0f} GiB RAM", f"torch {versions['torch']}"]
        when = f"{record['date'][:10]} at {record['commit']}"
        stolen = hardware.get("stolen", 0)  # older records lack it
        if stolen >= _MIN_STOLEN:
            when += f" (the host took {stolen:.0%} of the cores' time)"
        measured.setdefault(", ".join(parts), set()).add(when)
    return "\n".join(
        f"<sub>Measured on {machine}; {', '.join(sorted(whens))}.</sub>"
        for machine, whens in measured.items()
    )


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
    what.add_argument("--write", nargs="+", metavar="FILE", help="update these files")
    what.add_argument("--check", nargs="+", metavar="FILE", help="exit 1 if one is out of date")
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
