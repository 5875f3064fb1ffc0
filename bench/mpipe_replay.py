"""What the present policies decide by the times and speeds in the records `mpipe-strategy` and
`mpipe-granularity`, which stay as they were measured."""

import json
from pathlib import Path
from typing import Any

from mpipe_layers import LAYERS, NUMBERS, Row, show
from mpipe_reuse import REUSING, selection, strategy_figures
from record import RESULTS, metric

from overspill.plan.granularity import GranularitySearch
from overspill.plan.reuse import Speeds

NOTE = "decided from these times by policies that were changed after the measurement"
_LAYERS = {spec.name: spec for spec in LAYERS}


def replay(out: Path | None) -> None:
    folder = out or RESULTS
    for name, decide in (("mpipe-strategy", _strategy), ("mpipe-granularity", _granularity)):
        path = folder / f"{name}.json"
        record = json.loads(path.read_text())
        decide(record)
        record["config"]["replayed"] = NOTE
        for row in record["table"]:
            show(row)
        path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _strategy(record: dict[str, Any]) -> None:
    above = []
    for row, speeds in zip(record["table"], record["config"]["speeds"], strict=True):
        ms = {name: float(row[f"{name}, ms"]) for name in REUSING}
        spec = _LAYERS[row["layer"].split(",")[0]]
        columns, shares = selection(spec, Speeds(**speeds), ms)
        row.update(columns)
        above.append(shares)
    compare, metrics = strategy_figures(above)
    record["config"]["compare"] = f"{compare}; {NOTE}"
    record["metrics"] = {key: value._asdict() for key, value in metrics.items()}


def _granularity(record: dict[str, Any]) -> None:
    """Adds what the present search would cost. What was measured is that of its own commit."""
    searches: dict[str, GranularitySearch] = {}
    costs = []
    for row in record["table"]:
        search = searches.setdefault(row["layer"], GranularitySearch())
        chosen, extra = _search(search, row)
        row["replayed"] = f"n = {chosen}, search {extra:.2f}%"
        costs.append(extra)
    record["metrics"]["search, replayed"] = metric(costs, "%")._asdict()


def _search(search: GranularitySearch, row: Row) -> tuple[int, float]:
    """The chosen number, and the time that trials take more, in percent of 100 steps."""
    tokens = int(row["tokens"].replace(",", ""))
    ms = {n: float(row[f"n = {n}, ms"]) for n in NUMBERS}
    tried = []
    while search.settled(tokens) is None:
        tried.append(search.choose(tokens))
        search.report(tokens, tried[-1], ms[tried[-1]])
    chosen = search.choose(tokens)
    # as measured: the first pass is not counted
    return chosen, sum(ms[n] - ms[chosen] for n in tried[1:]) / ms[chosen]
