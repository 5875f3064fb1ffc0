"""The picture is drawn for any curves."""

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
        pytest.param(Curve((1,), (5.0,)), marks=pytest.mark.slow),  # never faster, one point only
    ],
)
def test_any_curve_is_drawn(cpu: Curve, tmp_path: Path) -> None:
    costs = dataclasses.replace(some_costs(), cpu_forward=cpu)
    path = tmp_path / "deep" / "costs.png"
    draw_costs(costs, path, "one expert")
    width, height = png_size(path)
    assert width > 1500
    assert height > 600
