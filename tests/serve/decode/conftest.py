"""Fused steps in Triton's interpreter: few programs, and what was computed."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.moe.oracle import threads_left


def count(kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that steps of this kind compute."""
    sizes: list[int] = []
    call = kind.__call__

    def counted(self: Any, batch: Any) -> Any:
        sizes.append(len(batch.tokens))
        return call(self, batch)

    monkeypatch.setattr(kind, "__call__", counted)
    return sizes


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches of fused steps. Few programs: the interpreter is slow. Requests to
    the CPU are then milliseconds apart, in which threads that spin would use the cores."""
    from overspill.compute import misses
    from overspill.compute.decode import constants
    from overspill.serve.decode.step import DecodeStep
    from tests.triton_interpreter import without_overflow_checks

    without_overflow_checks(monkeypatch)
    monkeypatch.setattr(misses, "SPIN_NS", 20_000)
    tiles = "LARGE_TILE", "SMALL_TILE", "EXPERT_IN_TILE", "EXPERT_OUT_TILE"
    for name in (*tiles, "PACKED_IN_TILE", "PACKED_OUT_TILE"):
        monkeypatch.setattr(constants, name, constants.Tile(64, 64, 4))
    return count(DecodeStep, monkeypatch)


@pytest.fixture
def module_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches of steps through the modules of a model."""
    from overspill.serve.decode.module_step import ModuleStep

    return count(ModuleStep, monkeypatch)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not threads_left()
