"""Benchmarks of adapters of experts write their records."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("scripts")


def record(script: str, name: str, folder: Path, *more: str) -> Any:
    importlib.import_module(script).main(["--smoke", "--out", str(folder), *more])
    return json.loads((folder / f"{name}.json").read_text())["metrics"]


def test_served_adapters(tmp_path: Path) -> None:
    metrics = record("serve_adapter", "serve-adapter", tmp_path)
    assert {"tokens_per_second", "times", "quarter_times"} <= metrics.keys()
    assert metrics["quarter_tokens_per_second"]["median"] > 0


@pytest.mark.parametrize(
    ("name", "more"), [("lora-experts-30b", ()), ("qlora-30b", ("--packing", "mxfp4"))]
)
def test_trained_adapters(name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    metrics = record("lora_experts", name, tmp_path, *more)
    assert metrics["tokens_per_second"]["median"] > 0
