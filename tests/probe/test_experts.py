"""What an expert costs: measured on a CPU alone."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertShape
from overspill.probe.experts import dtype_name, measure_expert, rising
from tests.probe.little import LITTLE, assert_costs

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_expert_is_measured_without_a_gpu(dtype: torch.dtype, threads: int) -> None:
    shape = ExpertShape(32, 64, gated=threads == 1)
    told: list[tuple[int, int]] = []
    costs = measure_expert(
        shape,
        dtype,
        CPU,
        threads,
        lambda _, done, total: told.append((done, total)),
        tokens=(1, 4, 16),
        effort=LITTLE,
    )
    assert_costs(costs)
    assert (costs.shape, costs.dtype, costs.threads) == (shape, dtype_name(dtype), threads)
    assert costs.cpu_forward.tokens == (1, 4, 16)
    assert told == [(n, len(told) - 1) for n in range(len(told))]


@pytest.mark.parametrize(
    "shape",
    [
        ExpertShape(3, 3, gated=True),
        ExpertShape(1, 1, gated=False),
        ExpertShape(24, 40, gated=True, bias=True, transposed=True),
    ],
)
def test_tiny_experts_are_measured(shape: ExpertShape) -> None:
    assert_costs(measure_expert(shape, torch.bfloat16, CPU, 1, tokens=(1, 4), effort=LITTLE))


def test_experts_that_the_cpu_cannot_compute_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot compute such experts: torch\.float16"):
        measure_expert(ExpertShape(24, 40, gated=True), torch.float16, CPU, 1)


def test_an_expert_larger_than_the_memory_for_it_is_measured_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overspill.probe.experts.available_memory", lambda: 1 << 20)
    shape = ExpertShape(256, 1024, gated=False)
    assert_costs(measure_expert(shape, torch.bfloat16, CPU, 1, tokens=(1, 4), effort=LITTLE))


def test_slow_points_end_a_curve() -> None:
    effort = dataclasses.replace(LITTLE, slow=1e-9)
    shape = ExpertShape(64, 128, gated=False)
    tokens = (1, 512, 1024, 4096)
    costs = measure_expert(shape, torch.float32, CPU, 1, tokens=tokens, effort=effort)
    assert costs.cpu_forward.tokens[-1] < 4096
    assert len(costs.cpu_forward.tokens) >= 2
    assert costs.cpu_forward(4096) > costs.cpu_forward(1024)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=8))
def test_a_disturbed_point_is_brought_down_and_no_other(seconds: list[float]) -> None:
    curve = rising(list(enumerate(seconds, start=1)))
    assert list(curve.seconds) == sorted(curve.seconds)
    for number, time in enumerate(curve.seconds):
        assert time == min(seconds[number:])
