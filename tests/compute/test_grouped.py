"""The choice of the backend of a wave's products."""

import pytest
import torch

from overspill.compute import grouped
from overspill.compute.experts import StackedWeights, wave_backward, wave_forward
from overspill.core.experts import ExpertShape


def chosen(
    dtype: torch.dtype,
    device: str,
    d_model: int = 16,
    n_rows: int = 5,
    n_experts: int = 2,
    resident: bool = False,
) -> grouped.Backend:
    shape = ExpertShape(d_model, 32, gated=True)
    x = torch.zeros(n_rows, d_model, dtype=dtype, device=device)
    weights = torch.zeros(n_experts, shape.numel, dtype=dtype, device=device)
    return grouped.backend_for(x, weights, shape, resident)


def test_the_cpu_loops_over_experts() -> None:
    assert chosen(torch.bfloat16, "cpu") == "loop"
    assert chosen(torch.float32, "cpu") == "loop"


def test_a_forced_backend_holds_until_the_context_ends() -> None:
    with grouped.forced("triton"):
        assert chosen(torch.float32, "cpu") == "triton"
        with grouped.forced("loop"):
            assert chosen(torch.float32, "cpu") == "loop"
        assert chosen(torch.float32, "cpu") == "triton"
    with pytest.raises(ZeroDivisionError), grouped.forced("triton"):
        raise ZeroDivisionError
    assert chosen(torch.float32, "cpu") == "loop"


def test_one_resident_expert_needs_no_groups() -> None:
    shape = ExpertShape(8, 12, gated=True)
    weights = StackedWeights(torch.randn(1, 24, 8), torch.randn(1, 8, 12))
    x, dy, row_weight = torch.randn(5, 8), torch.randn(5, 8), torch.rand(5)
    ends = torch.tensor([5], dtype=torch.int32)

    def computed(backend: grouped.Backend) -> list[torch.Tensor]:
        with grouped.forced(backend):
            y, hidden = wave_forward(x, weights, shape, ends, [5])
            grads = wave_backward(x, dy, row_weight, weights, shape, ends, [5], hidden)
        return [y, hidden, grads.dx_RD, grads.drow_weight_R, *grads.dw]

    for single, loop in zip(computed("single"), computed("loop"), strict=True):
        torch.testing.assert_close(single, loop)


@pytest.mark.gpu
def test_a_gpu_uses_torch_where_it_can_and_triton_for_the_rest() -> None:
    pytest.importorskip("triton")
    major, _ = torch.cuda.get_device_capability()
    if major < 8:
        pytest.skip("no grouped kernels below compute capability 8")
    assert chosen(torch.bfloat16, "cuda") == ("torch" if major in (9, 10) else "triton")
    assert chosen(torch.bfloat16, "cuda", d_model=20) == "triton"
    assert chosen(torch.bfloat16, "cuda", n_experts=1024) == "triton"
    assert chosen(torch.float32, "cuda") == "loop"
    assert chosen(torch.float64, "cuda") == "loop"
    assert chosen(torch.bfloat16, "cuda", n_rows=0) == "loop"
    assert chosen(torch.float32, "cuda", n_experts=1, resident=True) == "single"
    assert chosen(torch.bfloat16, "cuda", n_experts=1) == (
        "torch" if major in (9, 10) else "triton"
    )
