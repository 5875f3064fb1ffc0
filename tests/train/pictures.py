"""Runs without a picture of their losses: it takes longer than training a tiny model."""

import pytest


@pytest.fixture
def pictures() -> None:
    """For tests that look at them."""


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("overspill.train.loop.draw_loss", lambda *args: None)
