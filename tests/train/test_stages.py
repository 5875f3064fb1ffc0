"""`overspill train --stages`: the same training, with micro-batches in stages."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from overspill.core.errors import ConfigError
from overspill.train.config import TrainConfig
from overspill.train.metrics import read_lines
from overspill.train.trainer import train
from tests.train.fakes import Watcher, tiny_settings

GIVEN = {"layers": 3, "batch": 2, "accumulate": 2, "steps": 3, "eval_every": 2, "save_every": 0}


def run(settings: dict[str, Any], display: Watcher | None = None) -> Watcher:
    display = display or Watcher()
    train(TrainConfig.make(settings), display)
    return display


@pytest.mark.parametrize(
    "extra",
    [
        {},
        pytest.param({"clip": 0.0, "checkpoint_layers": False}, marks=pytest.mark.slow),
        pytest.param({"moe_every": 2, "accumulate": 1}, marks=pytest.mark.slow),
    ],
    ids=["clipped", "updates during backward", "dense blocks, one micro-batch"],
)
def test_losses_equal_those_without_stages(tmp_path: Path, extra: dict[str, Any]) -> None:
    """Also the cross-entropy, the balance loss and the norms that are logged."""
    given = GIVEN | extra
    plain = run(tiny_settings(tmp_path, out=str(tmp_path / "a"), group=False, **given))
    staged = run(tiny_settings(tmp_path, out=str(tmp_path / "b"), stages=3, **given))
    # nano has one matrix for embedding and head, whose gradients are added in another order
    assert staged.losses == pytest.approx(plain.losses, rel=1e-6)
    assert staged.evals == pytest.approx(plain.evals, rel=1e-6)
    logged = [
        [
            [line.get(name) for name in ("loss", "ce", "balance", "grad_norm")]
            for line in read_lines(tmp_path / name / "metrics.jsonl")
            if "ce" in line
        ]
        for name in "ab"
    ]
    for one, other in zip(*logged, strict=True):
        assert [value or 0.0 for value in one] == pytest.approx([v or 0.0 for v in other], rel=1e-5)


def test_a_run_in_stages_resumes_to_the_same_bits(tmp_path: Path) -> None:
    given = GIVEN | {"stages": 2}
    straight = run(tiny_settings(tmp_path, out=str(tmp_path / "a"), **given))
    settings = tiny_settings(tmp_path, out=str(tmp_path / "b"), **given)
    stop = Watcher(lambda done: os.kill(os.getpid(), signal.SIGINT) if done == 2 else None)
    first = run(settings, stop)
    assert len(first.losses) == 2
    rest = run({**settings, "resume": True})
    assert first.losses + rest.losses == straight.losses
    assert first.evals + rest.evals == straight.evals
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, two = (tmp_path / name / "checkpoints/step-00000003" / file for name in "ab")
        assert one.read_bytes() == two.read_bytes()


def test_more_stages_than_blocks_are_refused(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, stages=4, layers=3)
    with pytest.raises(ConfigError, match=r"--stages 4: .*nano has 3 blocks; give 1 to 3"):
        run(settings)
    assert not (tmp_path / "run").exists(), "before anything is built or written"
    with pytest.raises(ConfigError, match="--stage-gpus 3 needs at least as many --stages"):
        TrainConfig.make(tiny_settings(tmp_path, stages=2, stage_gpus=3))
