"""On a GPU: figures that any one would give. No property tests here: they may not be installed."""

import gc

import pytest
import torch

from overspill.core.experts import ExpertShape
from overspill.probe.experts import TOKENS, measure_expert
from overspill.probe.measure import measure_machine
from tests.probe.little import assert_costs, assert_limits


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    limits = measure_machine(torch.device("cuda"), 2)
    assert_limits(limits)
    assert limits.link > 1e9


def allocated() -> int:
    """GPU memory without what other tests left, and without the workspaces of cuBLAS, which torch
    keeps for each stream."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_expert_is_measured_on_a_gpu(dtype: torch.dtype) -> None:
    shape = ExpertShape(1024, 4096, gated=False)
    before = allocated()
    costs = measure_expert(shape, dtype, torch.device("cuda"), 4)
    assert_costs(costs)
    assert allocated() == before
    assert shape.numel * dtype.itemsize / costs.load > 1e9
    assert costs.load_beside >= 0.9 * costs.load
    assert costs.gpu_forward.tokens == (*TOKENS, 4 * TOKENS[-1])
    assert costs.gpu_forward(1024) < costs.cpu_forward(1024)
    assert costs.cpu_forward(256) < 1.2 * costs.cpu_backward(256)
    assert 1e-5 < costs.round_trip < 2e-3
