"""A small MoE learns to classify sentences, and where its experts lie makes no difference."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SST2 = Path(os.environ.get("OVERSPILL_SST2", ROOT.parent / "shared" / "data" / "sst2"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes, where two cores are shared
@pytest.mark.skipif(
    not (SST2 / "train.tsv.gz").is_file(),
    reason="needs SST-2: OVERSPILL_SST2=folder of train.tsv.gz and test.tsv.gz",
)
def test_sst2_is_learned_with_and_without_offload_alike(tmp_path: Path) -> None:
    length = ["--pretrain-steps", "200", "--steps", "500"]
    places = [str(SST2), "--folder", str(tmp_path), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "bench" / "sst2.py"), *length, *places]
    subprocess.run(command, env=environment, check=True)
    record = json.loads((tmp_path / "finetune-sst2.json").read_text())
    metrics = record["metrics"]
    assert metrics["accuracy_resident"]["median"] >= record["config"]["majority"] + 0.1
    accuracies = [
        metrics[name][bound]
        for name in ("accuracy_resident", "accuracy_offloaded")
        for bound in ("low", "high")
    ]
    assert len(set(accuracies)) == 1
    assert metrics["eval_loss"]["high"] - metrics["eval_loss"]["low"] < 1e-3
    assert metrics["losses_apart"]["high"] < 1e-3
