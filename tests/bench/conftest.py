"""Modules of bench/ as its scripts import them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Until the end of a test, `import train` finds bench/train.py."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    yield
    for name in set(sys.modules) - before:  # "train", for example, may be another module elsewhere
        if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
