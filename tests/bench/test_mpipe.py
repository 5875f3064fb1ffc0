"""bench/mpipe.py replay: records show what the present policies decide by the measured times."""

import shutil
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "bench" / "results"
NAMES = ("mpipe-strategy.json", "mpipe-granularity.json")


@pytest.mark.usefixtures("scripts")
def test_records_show_the_decisions_of_the_present_policies(tmp_path: Path) -> None:
    from mpipe_replay import replay

    for name in NAMES:
        shutil.copy(RESULTS / name, tmp_path)
    replay(tmp_path)
    for name in NAMES:
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text(), (
            f"{name} is out of date: run bench/mpipe.py replay"
        )
