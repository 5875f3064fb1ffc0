"""Benchmarks of a model with linear attention write their records."""

import importlib
import json
from pathlib import Path

import pytest

from tests.slow import slow_names

RECORDS = {
    "gpu": ("serve-qwen35-gpu", "tokens/s"),
    "24gib-4bit": ("serve-qwen35-24gib-4bit", "tokens/s"),
    "batch": ("serve-qwen35-batch", "tokens/s"),
    "prefix": ("prefix-qwen35", "s"),
}


@pytest.mark.parametrize("part", slow_names(RECORDS, *list(RECORDS)[1:]))
def test_each_part_writes_a_record(part: str, tmp_path: Path, scripts: None) -> None:
    name, unit = RECORDS[part]
    importlib.import_module("serve_qwen35").main([part, "--smoke", "--out", str(tmp_path)])
    record = json.loads((tmp_path / f"{name}.json").read_text())
    headline, *_ = record["metrics"].values()
    assert headline["median"] > 0
    assert headline["unit"] == unit
