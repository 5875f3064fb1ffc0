"""The benchmark of experts that are named ahead, with tiny models on the CPU."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "lookahead.py"


@pytest.mark.slow
def test_every_part_has_its_rows(
    scripts: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("overspill.models.predictor.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--smoke", "--disk", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if " | " in line]
    works = [work for work, *_ in rows]
    assert [works.count(work) for work in dict.fromkeys(works)] == [4, 2, 3, 3, 3]
