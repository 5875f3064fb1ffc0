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
from overspill.probe.measure import measure_machine

CURVES = (
    "cpu_forward", "cpu_backward", "cpu_training", "gpu_forward", "gpu_backward", "gpu_training"
)  # fmt: skip
LITTLE = Effort(
    seconds=0.002,
    slow=0.02,
    cold=1 << 20,
    copy=256 << 10,
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
    monkeypatch.setattr(known, "measure_machine", functools.partial(measure_machine, effort=LITTLE))
    monkeypatch.setattr(
        known,
        "measure_expert",
        functools.partial(measure_expert, effort=LITTLE, tokens=(1, 4, 16)),
    )


def assert_limits(limits: MachineProfile) -> None:
    assert 0 < limits.link < math.inf
    assert 0 < limits.host_read < math.inf


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
