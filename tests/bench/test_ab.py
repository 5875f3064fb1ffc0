"""Two versions are compared by runs that alternate."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.slow import slow_names

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "train-12-clip", "train-64", "train-hf", "train-micro", "train-ranks", "decode-quarter",
    "decode-all", "decode-batch", "prompt-half", "packed-none", "packed-all",
)  # fmt: skip


@pytest.fixture
def ab(scripts: None) -> Any:
    return importlib.import_module("ab")


def test_the_interval_of_a_ratio_holds_its_median_and_shrinks_with_pairs(ab: Any) -> None:
    same = ab.ratio_of([1.0, 1.1, 0.9, 1.05], [1.1, 1.0, 0.9, 1.0])
    assert same.low < 1 < same.high
    twice = ab.ratio_of([2.0, 2.2, 2.1, 1.9], [1.0, 1.0, 1.0, 1.0])
    assert 1.9 <= twice.low <= twice.median <= twice.high <= 2.2
    assert ab.ratio_of([2.0] * 6, [1.0] * 6) == (2.0, 2.0, 2.0)


def test_versions_alternate(ab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def measure(name: str, version: Path, shared: Path, smoke: bool) -> dict[str, Any]:
        order.append(version.name)
        return {"seconds": 1.0, "host": 0.5, "syncs": None, "bytes": len(version.name)}

    monkeypatch.setattr(ab, "measure", measure)
    row = ab.compare("train-5", [Path("old"), Path("newer")], 3, Path(), True)
    assert order == ["old", "newer", "newer", "old", "old", "newer"]
    assert row.speed == (1.0, 1.0, 1.0)
    assert row.further == {"host": (0.5, 0.5), "syncs": None, "bytes": (3, 5)}


@pytest.mark.parametrize("name", slow_names(NAMES, *(set(NAMES) - {"train-micro"})))
def test_workloads_run_on_the_cpu(name: str, scripts: None, tmp_path: Path) -> None:
    found = importlib.import_module("ab_work").run(name, tmp_path, smoke=True)
    assert found["seconds"] > 0
    assert found["host"] > 0
    assert found["bytes"] >= 0


@pytest.mark.slow
def test_a_revision_is_as_fast_as_itself(ab: Any, tmp_path: Path) -> None:
    given = ["HEAD", str(ROOT), "--only", "decode-all", "--pairs", "4", "--smoke"]
    ab.main([*given, "--out", str(tmp_path)])
    speed = json.loads((tmp_path / "ab.json").read_text())["metrics"]["decode_all"]
    assert 0.3 < speed["low"] <= 1.1
    assert 0.9 <= speed["high"] < 3
