"""The benchmark of speed over GPU memory writes a record, and a picture is drawn of it."""

import importlib
import json
from pathlib import Path

import pytest


@pytest.mark.usefixtures("scripts")
def test_a_record_has_a_row_for_each_budget_and_a_picture(tmp_path: Path) -> None:
    script = importlib.import_module("quantized_memory")
    script.main(["--smoke", "--budgets", "1", "--formats", "mxfp4", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "quantized-memory.json").read_text())
    (row,) = record["table"]
    assert (row["experts"], row["GPU memory"]) == ("mxfp4", 1)
    assert row["tokens/s"] > 0

    record["table"].append(row | {"experts": "bf16", "GPU memory": 2})
    (tmp_path / "quantized-memory.json").write_text(json.dumps(record))
    script.main(["--plot-only", "--results", str(tmp_path), "--out", str(tmp_path)])
    assert (tmp_path / record["config"]["picture"]).stat().st_size > 10_000
