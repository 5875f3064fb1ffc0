"""The benchmark against DeepSpeed pairs both sides by round and survives a side that fails."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


def line(side: str, seconds: float, **changes: Any) -> str:
    """A measurement as a child process prints it."""
    work = {"mode": "offload", "batch": 16, "clip": True}
    fields = {
        "side": side,
        "work": {**work, **{key: changes.pop(key) for key in work if key in changes}},
        "tokens": 1000,
        "seconds": [seconds, 2 * seconds, 0.5 * seconds],
        "loss": 10.0,
        "gpu_bytes": 12 << 30,
        "host_bytes": 60 << 30,
        "version": "1.2.3",
        "settings": {},
        "run": "a",
        "round": 0,
    }
    return json.dumps({"measurement": {**fields, **changes}}) + "\n"


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def benchmark(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    scripts: None,
) -> Callable[..., Ended]:
    """Runs the script in this process: another one would import torch again."""
    script = str(ROOT / "bench" / "peers" / "deepspeed.py")
    sys.path.insert(0, "replaced by the script")

    def run(lines: list[str], *arguments: str) -> Ended:
        file = tmp_path / "measurements.jsonl"
        file.write_text("".join(lines))
        paths = ["--measurements", str(file), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", [script, *paths, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        return Ended(ended.value.code, *capsys.readouterr())

    return run


def test_ratios_compare_the_two_sides_of_a_round(
    tmp_path: Path, benchmark: Callable[..., Ended]
) -> None:
    lines = [
        *(line("overspill", 1.0), line("deepspeed", 2.0)),
        *(line("overspill", 1.0, round=1), line("deepspeed", 3.0, round=1)),
        *(line("overspill", 1.0, run="b"), line("deepspeed", 4.0, run="b")),
        line("overspill", 0.001, run="c"),  # its peer has failed
        line("overspill", 0.5, clip=False),
        line("overspill", 1.0, batch=64),  # never measured for the peer
        *(line(side, 1.0, mode="gpu", clip=False) for side in ("overspill", "deepspeed")),
    ]
    done = benchmark(lines, "--rounds", "0")
    assert done.status == 0, done.err
    record = json.loads((tmp_path / "out" / "train-w1-vs-deepspeed.json").read_text())
    ratios = {key: value for key, value in record["metrics"].items() if value["unit"] == "×"}
    assert next(iter(record["metrics"])) == "ratio_16_clip"
    assert list(ratios) == ["ratio_16_clip", "ratio_16", "ratio_16_gpu"]
    assert ratios["ratio_16_clip"] == {"median": 3.0, "low": 2.0, "high": 4.0, "unit": "×"}
    assert ratios["ratio_16"]["median"] == 4.0
    assert record["metrics"]["deepspeed_16_clip_tokens_per_second"]["high"] == 1000.0
    assert record["metrics"]["overspill_16_host_memory"]["median"] == 60.0
    assert record["command"].startswith("PYTHONPATH=src python3 bench/peers/deepspeed.py ")
    assert record["config"]["deepspeed_version"] == "1.2.3"
    first = record["table"][0]
    assert first["work"] == "16×1024 tokens a step, both clip"
    assert first["times as fast (low–high)"] == "3.00 (2.00–4.00)"


def test_a_side_that_fails_is_told_and_the_rest_is_recorded(
    tmp_path: Path, benchmark: Callable[..., Ended]
) -> None:
    peer = tmp_path / "site"
    peer.mkdir()
    (peer / "deepspeed.py").write_text("raise ImportError('broken peer')")
    lines = [line("overspill", 1.0), line("deepspeed", 2.0)]
    child = ["--sides", "deepspeed", "--rounds", "1", "--peer-path", str(peer)]
    done = benchmark(lines, *child)
    assert done.status == 1
    assert "[deepspeed] ImportError: broken peer" in done.out
    assert "failed: deepspeed, offload, round 1: exit code 1" in done.err
    assert (tmp_path / "out" / "train-w1-vs-deepspeed.json").exists()


def test_no_child_starts_without_time_and_no_record_without_the_headline(
    tmp_path: Path, benchmark: Callable[..., Ended]
) -> None:
    done = benchmark([line("overspill", 1.0)], "--budget-s", "1")
    assert done.status == 1
    assert done.out.count("not started") == 4
    assert "the headline lacks a pair" in done.err
    assert not (tmp_path / "out").exists()
