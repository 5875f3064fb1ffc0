"""The picture: drawn whoever wins, and however few points there are."""

import dataclasses
from pathlib import Path

import pytest

from overspill.hardware.profile import Curve
from overspill.probe.picture import draw_costs
from tests.hardware.test_profile import some_costs
from tests.trace.test_picture import png_size


@pytest.mark.parametrize(
    "cpu",
    [
        Curve((1, 4, 16), (0.1, 0.2, 9.0)),  # crosses
        Curve((1, 4, 16), (1e-6, 2e-6, 3e-6)),  # always wins
        Curve((1, 4, 16), (5.0, 6.0, 7.0)),  # never wins
        Curve((1,), (0.1,)),
    ],
)
def test_whoever_wins_it_is_drawn(cpu: Curve, tmp_path: Path) -> None:
    costs = dataclasses.replace(some_costs(), cpu_forward=cpu)
    path = tmp_path / "deep" / "costs.png"
    draw_costs(costs, path, "one expert")
    width, height = png_size(path)
    assert width > 1500
    assert height > 600
