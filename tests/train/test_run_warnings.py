from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.train import run_warnings
from overspill.train.config import TrainConfig
from overspill.train.run_warnings import matrix_rate, warnings_before
from overspill.train.train_spec import plan_training
from tests.train.fakes import tiny_settings


@pytest.fixture(autouse=True)
def _slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_warnings, "matrix_rate", lambda dtype: 100e9)
    monkeypatch.setattr(run_warnings, "is_on_root", lambda folder: folder.parent.name == "system")


def _warnings(folder: Path, **changes: Any) -> list[str]:
    config = TrainConfig.make(tiny_settings(folder, device="cpu", **changes))
    return list(warnings_before(plan_training(config, lambda line: None)))


def test_a_run_of_days_on_a_cpu_says_so(tmp_path: Path) -> None:
    shape = {"preset": "w1", "steps": 500, "batch": 8, "seq_len": 1024}
    big = {**shape, "layers": 24, "experts": 16, "d_model": 1024, "d_hidden": 4096, "heads": 16}
    (warning,) = _warnings(tmp_path, **big, threads=2)
    # 0.71 B active parameters · 8,192 tokens · 8 operations at 100 G/s are 460 s a step, and the
    # update of 4.9 B parameters takes 7 s
    assert "the run takes 3 days or more: 500 steps of 8,192 tokens" in warning
    assert "0.7 B active parameters" in warning


def test_a_short_run_says_nothing_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(run_warnings, "matrix_rate")
    assert _warnings(tmp_path) == []


def test_a_disk_on_the_root_file_system_is_named(tmp_path: Path) -> None:
    (tmp_path / "system").mkdir()
    (warning,) = _warnings(tmp_path, disk=str(tmp_path / "system" / "spill"))
    assert f"--disk {tmp_path}/system/spill is on the root file system" in warning
    assert _warnings(tmp_path, disk=str(tmp_path / "ssd")) == []
    assert _warnings(tmp_path, disk=str(tmp_path / "not mounted" / "system" / "spill")) == []


def test_the_rate_of_the_cpu_is_measured() -> None:
    assert 1e8 < matrix_rate(torch.float32) < 1e14
