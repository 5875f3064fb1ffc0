"""The benchmarks of experts that the CPU trains, with tiny models on the CPU."""

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


@pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")
def test_factored_gradients_are_measured(
    scripts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SCRIPT.with_name("factored.py")
    monkeypatch.setattr(sys, "argv", [str(script), "--smoke", "--out", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    record = json.loads((tmp_path / "factored-gradients.json").read_text())
    assert record["metrics"]["speedup"]["median"] > 0
    assert [row["token rows"] for row in record["table"]] == ["3"]
