"""Commands without their pictures: drawing one takes longer than training a tiny model."""

import pytest


@pytest.fixture
def pictures() -> None:
    """For tests that look at them."""


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        for draw in ("overspill.train.loop.draw_loss", "overspill.probe.picture.draw_costs"):
            monkeypatch.setattr(draw, lambda *args: None)
