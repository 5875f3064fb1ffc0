"""Commands without what takes longer than training a tiny model."""

import contextlib

import pytest

DRAWINGS = ("train.loop.draw_loss", "train.loop.draw_timeline", "probe.picture.draw_costs")


@pytest.fixture
def pictures() -> None:
    """For tests that look at them."""


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # it counts the objects of all imported modules, which tests/conftest.py has frozen
    monkeypatch.setattr("overspill.train.loop.short_collections", contextlib.nullcontext)
    if "pictures" not in request.fixturenames:
        for draw in DRAWINGS:
            monkeypatch.setattr("overspill." + draw, lambda *args: None)
