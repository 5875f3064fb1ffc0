"""Measuring with next to no effort: the figures are rough, but they are figures."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill.compute.cpu_kernel import cpu_isa
from overspill.hardware import native
from overspill.hardware.profile import Curve, ExpertCosts, MachineProfile
from overspill.optim.kernel import kernel_name
from overspill.probe import known
from overspill.probe.clock import Effort
from overspill.probe.experts import measure_expert
from overspill.probe.measure import measure_disk, measure_machine

CURVES = (
    "cpu_forward", "cpu_backward", "cpu_training", "gpu_forward", "gpu_backward", "gpu_training"
)  # fmt: skip
LITTLE = Effort(
    seconds=0.002,
    slow=0.02,
    cold=1 << 20,
    largest_copy=256 << 10,
    largest_matrix=64,
    disk=4 << 20,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of the test's own, so that it finds no profile and leaves none."""
    cpu_isa(), kernel_name()  # compiled kernels may come from the usual one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.cache_folder.cache_clear()
    yield
    native.cache_folder.cache_clear()


@pytest.fixture
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what asks for the usual effort."""
    monkeypatch.setattr(known, "measure_disk", functools.partial(measure_disk, effort=LITTLE))
    monkeypatch.setattr(known, "measure_machine", functools.partial(measure_machine, effort=LITTLE))
    monkeypatch.setattr(
        known,
        "measure_expert",
        functools.partial(measure_expert, effort=LITTLE, tokens=(1, 4, 16)),
    )


def assert_limits(limits: MachineProfile, but: set[str]) -> None:
    """Positive and finite, all of them `but` those, which are None."""
    for field in dataclasses.fields(limits):
        value = getattr(limits, field.name)
        if field.name in but:
            assert value is None, field.name
        elif isinstance(value, float):
            assert math.isfinite(value), field.name
            assert value > 0, field.name
    for row in limits.transfers:
        assert all(0 < rate < math.inf for rate in (row.up, row.down, row.up_both, row.down_both))


def assert_costs(costs: ExpertCosts) -> None:
    for field in dataclasses.fields(costs):
        value = getattr(costs, field.name)
        if isinstance(value, float):
            assert 0 < value < math.inf, field.name
    for name in CURVES:
        curve: Curve = getattr(costs, name)
        assert all(0 < seconds < math.inf for seconds in curve.seconds), name
        assert list(curve.seconds) == sorted(curve.seconds), name
    assert costs.load_beside >= costs.load
    assert costs.cpu_beside >= 1
