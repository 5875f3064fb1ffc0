"""The benchmark of served adapters writes its record."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_a_record_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    try:
        importlib.import_module("serve_adapter").main(["--smoke", "--out", str(tmp_path)])
    finally:
        for name in set(sys.modules) - before:
            if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    record = json.loads((tmp_path / "serve-adapter.json").read_text())
    metrics = record["metrics"]
    assert {"tokens_per_second", "times", "quarter_times"} <= metrics.keys()
    assert metrics["quarter_tokens_per_second"]["median"] > 0
