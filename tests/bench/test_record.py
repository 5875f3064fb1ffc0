"""Benchmark records hold what it takes to measure again, and nothing about who measured."""

import json
import platform
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from bench import record
from bench.record import Limit, Metric, metric, write_record

SPEED = metric([30.0, 10.0, 11.0, 12.0], "tok/s")


def test_a_metric_is_median_lowest_and_highest() -> None:
    assert metric([30.0, 10.0, 11.0, 12.0], "tok/s") == Metric(11.5, 10.0, 30.0, "tok/s")
    for bad in ([], [float("nan")], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="finite"):
            metric(bad, "s")


def test_a_record_holds_every_field_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = str(record.ROOT / "bench" / "results")
    arguments = ["--steps", "3", f"--out={inside}", "--disk", "/nvme/spill", "--note", "two words"]
    monkeypatch.setattr(sys, "argv", ["/some/where/bench/train.py", *arguments])
    path = write_record(
        "train-w1-16x1024",
        {"row": "W1"},
        {"speed": SPEED, "memory": metric([1.0], "GiB")},
        Limit(20.0, "tok/s", "measured"),
        out=tmp_path / "new",
    )
    assert path == tmp_path / "new" / "train-w1-16x1024.json"
    written = json.loads(path.read_text())
    assert list(written) == [
        *("name", "command", "commit", "date", "hardware", "versions"),
        *("config", "metrics", "limit"),
    ]
    assert written["command"] == (
        "PYTHONPATH=src python3 bench/train.py --steps 3 --out=bench/results --disk spill "
        "--note 'two words'"
    )
    assert datetime.fromisoformat(written["date"]).utcoffset() == timedelta(0)
    assert list(written["metrics"]) == ["speed", "memory"]
    assert written["metrics"]["speed"] == {"median": 11.5, "low": 10, "high": 30, "unit": "tok/s"}
    assert written["limit"] == {"value": 20.0, "unit": "tok/s", "source": "measured"}
    assert written["hardware"]["cores"] >= 1
    assert written["hardware"]["ram_gib"] > 0
    assert 0 <= written["hardware"]["stolen"] < 1
    assert written["versions"]["python"] == platform.python_version()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    host = platform.node()
    assert not host or host not in path.read_text()


def test_the_command_names_a_script_in_a_folder_of_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    for script, named in {
        str(record.ROOT / "bench" / "peers" / "deepspeed.py"): "bench/peers/deepspeed.py",
        "/bench/copy/bench/train.py": "bench/train.py",
        "/elsewhere/train.py": "bench/train.py",
    }.items():
        monkeypatch.setattr(sys, "argv", [script, "--gpu"])
        assert record.command() == f"PYTHONPATH=src python3 {named} --gpu"


def test_a_table_is_kept(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"experts": 8, "tok/s": 10.0}, {"experts": 16, "tok/s": None}]
    path = write_record("scale-moe-l", {}, {"speed": SPEED}, None, out=tmp_path, table=rows)
    written = json.loads(path.read_text())
    assert written["table"] == rows
    assert written["limit"] is None


def test_a_record_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'Train W1'"):
        write_record("Train W1", {}, {"speed": SPEED}, None, out=tmp_path)
    with pytest.raises(ValueError, match="no metric"):
        write_record("train-w1", {}, {}, None, out=tmp_path)
    with pytest.raises(ValueError, match="in GB/s, its headline in tok/s"):
        write_record("train-w1", {}, {"speed": SPEED}, Limit(1, "GB/s", "x"), out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_commit_comes_from_a_file_or_else_from_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.commit() == "unknown"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    assert record.commit() == "unknown", "a repository without a commit does not know either"
    subprocess.run([*git, "commit", "-qm", "x", "--allow-empty"], cwd=tmp_path, check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert head.startswith(record.commit())
    (tmp_path / "COMMIT").write_text("abc1234\n")
    assert record.commit() == "abc1234", "a copy's own git may be of another state"
