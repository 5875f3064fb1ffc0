"""A run killed with SIGKILL at any moment resumes to the same bits."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from overspill.train.metrics import read_lines
from tests.cli.forks import Forks
from tests.train.fakes import tiny_settings


def _flags(folder: Path, out: Path, extra: dict[str, object]) -> list[str]:
    settings = {**tiny_settings(folder, steps=9), **extra, "out": str(out)}
    return [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def _numbers(out: Path) -> list[tuple[object, ...]]:
    names = ("step", "loss", "ce", "balance", "lr", "grad_norm", "eval_loss")
    lines = read_lines(out / "metrics.jsonl")
    return [tuple(line.get(name) for name in names) for line in lines]


def _tensors(out: Path) -> list[bytes]:
    folder = out / "checkpoints" / "step-00000009"
    return [(folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def _kill_and_resume(
    forks: Forks, folder: Path, extra: dict[str, object], rounds: int, saved: bool = False
) -> None:
    """Kills each run twice; with `saved` when it has a checkpoint."""
    log = folder / "log.txt"
    began = time.monotonic()
    assert forks.run(["train", *_flags(folder, folder / "whole", extra)], log) == 0, log.read_text()
    length = time.monotonic() - began
    expected, moments = _numbers(folder / "whole"), random.Random(7)
    assert len(expected) > 9
    for number in range(rounds):
        out = folder / f"killed-{number}"
        for _ in range(2):
            after = moments.uniform(0, length)
            while _start(forks, folder, out, extra, after, saved) != -signal.SIGKILL:
                shutil.rmtree(out)  # it was faster than the first
                after /= 2
        assert _start(forks, folder, out, extra) == 0, log.read_text()
        assert _numbers(out) == expected
        assert _tensors(out) == _tensors(folder / "whole")
        assert len(list((out / "checkpoints").iterdir())) == extra.get("keep", 2)


def _start(
    forks: Forks,
    folder: Path,
    out: Path,
    extra: dict[str, object],
    kill_after: float | None = None,
    saved: bool = False,
) -> int:
    resume = ["--resume"] if out.exists() else []
    pid = forks.start(["train", *_flags(folder, out, extra), *resume], folder / "log.txt")
    if kill_after is not None:
        deadline = time.monotonic() + 60
        while saved and not list(out.glob("checkpoints/step-*")):
            assert time.monotonic() < deadline, (folder / "log.txt").read_text()
            time.sleep(1e-3)
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)  # a child that has ended is there until it is waited for
    return forks.wait(pid)


def test_a_killed_run_resumes_to_the_same_bits(forks: Forks, tmp_path: Path) -> None:
    _kill_and_resume(forks, tmp_path, {}, rounds=1, saved=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "extra",
    [
        {"save_every": 1},
        {"save_every": 1, "clip": 0},
        {"mode": "disk", "host_slots": 3},
        {"accumulate": 2, "save_every": 1, "keep": 1},
        {"mode": "gpu"},
    ],
    ids=["clip", "no-clip", "disk", "accumulate", "gpu"],
)
def test_many_killed_runs_resume_to_the_same_bits(
    forks: Forks, tmp_path: Path, extra: dict[str, object]
) -> None:
    if extra.get("mode") == "disk":
        extra = {**extra, "disk": str(tmp_path / "spill")}
    if extra.get("mode") == "gpu":
        extra = {**extra, "slots": 8}
    _kill_and_resume(forks, tmp_path, extra, rounds=10)


def test_ctrl_c_saves_says_how_to_go_on_and_exits_with_130(forks: Forks, tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log.txt"
    flags = _flags(tmp_path, out, {"steps": 100000, "save_every": 0, "eval_every": 0})
    pid = forks.start(["train", *flags], log)
    while not (out / "metrics.jsonl").exists() or not list(read_lines(out / "metrics.jsonl")):
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    assert forks.wait(pid) == 130
    step = list(read_lines(out / "metrics.jsonl"))[-1]["step"]
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    assert log.read_text().endswith(f"to continue: overspill train --resume --out {out}\n")
    arguments = ["train", "--resume", "--out", str(out), "--steps", str(step + 2)]
    assert forks.run(arguments, log) == 0, log.read_text()
    assert list(read_lines(out / "metrics.jsonl"))[-1]["step"] == step + 2
