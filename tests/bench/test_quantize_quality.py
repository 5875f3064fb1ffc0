"""The benchmark of the quality of quantized experts, with a toy."""

import gzip
import importlib
import json
import random
import sys
from pathlib import Path

import pytest


def test_every_format_is_measured_and_recorded(
    scripts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = importlib.import_module("quantize_quality")
    data, words = tmp_path / "wikitext-2", ["the", "film", "town", "good", "of", "it", "was"]
    data.mkdir()
    for name in ("train", "valid"):
        text = " ".join(random.Random(0).choices(words, k=400))
        (data / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    given = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu", "--tiny"]
    monkeypatch.setattr(sys, "argv", ["bench/quantize_quality.py", *given])
    assert bench.main() == 0
    record = json.loads((tmp_path / "out" / "quantize-quality.json").read_text())
    assert next(iter(record["metrics"])) == "mxfp4_increase"
    assert [row["experts"] for row in record["table"]] == ["bf16", "fp8", "int4", "mxfp4"]
    bits = [float(row["bits a weight"]) for row in record["table"]]
    assert bits == [16, pytest.approx(8, abs=0.3), 4.5, 4.25]
    figures = [record["metrics"][name]["median"] for name in ("bf16", "fp8", "int4", "mxfp4")]
    assert figures == pytest.approx([figures[0]] * 4, rel=0.05)
    assert len(set(figures)) == 4
