"""The benchmark of pipeline stages, with a tiny model on the CPU."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "stages.py"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["w1", "aptmoe-s-16"])
def test_stages_and_baselines_have_the_same_losses(
    model: str, scripts: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--smoke", "--model", model])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    losses = dict(line.split(" [", 1) for line in capsys.readouterr().out.splitlines())
    ours, peers = (
        ("without stages", "4 stages"),
        ("GPipe on the GPU", "GPipe, naive offload", "as in Mobius"),
    )
    for names in (ours, peers):  # the two sides draw their weights in different ways
        assert len({losses[name].split("]")[0] for name in names}) == 1
