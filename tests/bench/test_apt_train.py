"""The benchmark of experts that the CPU trains, with tiny models on the CPU."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from overspill.compute.cpu_kernel import cpu_isa
from tests.slow import slow_rows

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "apt_train.py"


@pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("work", "name"),
    slow_rows([("stack", "apt-train"), ("many", "apt-train-many"), ("w1", "apt-w1")], 1, 2),
)
def test_each_work_writes_its_record(
    work: str, name: str, scripts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [str(SCRIPT), work, "--smoke", "--out", str(tmp_path), "--timeline", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert next(iter(record["metrics"])) == "speedup"
    rows = record.get("table", [record["config"]])
    assert all(row["experts on the CPU"] != "0%" for row in rows)
    assert list(tmp_path.glob("*.png"))
