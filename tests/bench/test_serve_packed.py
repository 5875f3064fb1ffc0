"""Benchmarks of packed experts write their records."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.slow import slow_names

BENCH = Path(__file__).resolve().parents[2] / "bench"
RECORDS = {
    "w2-gpu": "serve-w2-gpu-4bit",
    "w2-fp8": "serve-w2-fp8",
    "w2-none": "serve-w2-none-4bit",
    "prefill": "prefill-30b-4bit",
    "30b-24gib": "serve-30b-24gib-4bit",
}


@pytest.mark.parametrize("part", slow_names(RECORDS, *list(RECORDS)[1:]))
def test_each_part_writes_a_record(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    try:
        importlib.import_module("serve_packed").main([part, "--smoke", "--out", str(tmp_path)])
    finally:
        for name in set(sys.modules) - before:
            if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    record = json.loads((tmp_path / f"{RECORDS[part]}.json").read_text())
    assert record["metrics"]["tokens_per_second"]["median"] > 0
    assert record["limit"]["unit"] == "tokens/s"


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
def test_experts_on_the_cpu_have_a_row_for_each_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu_packed.py", "--smoke", "--out", str(tmp_path)])
    script = importlib.import_module("cpu_packed")
    script.main()
    record = json.loads((tmp_path / "cpu-packed.json").read_text())
    assert len(record["table"]) == len(script.FORMATS) * len(script.TOKENS)
