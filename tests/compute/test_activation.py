"""The activation compared with autograd, and the fused kernels compared with torch."""

import pytest
import torch
import torch.nn.functional as F

from overspill.compute.activation import Fused, activate_backward_torch, activate_torch


def oracle(h: torch.Tensor, gated: bool) -> torch.Tensor:
    if not gated:
        return F.gelu(h)
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("gated", [False, True])
def test_backward_is_the_gradient_of_the_weighted_activation(gated: bool) -> None:
    h = torch.randn(7, 48 if gated else 24, dtype=torch.float64, requires_grad=True)
    row_weight = torch.rand(7, dtype=torch.float64, requires_grad=True)
    da = torch.randn(7, 24, dtype=torch.float64)
    a = oracle(h, gated)
    torch.testing.assert_close(Fused(gated).forward(h.detach()), a)
    (row_weight[:, None] * a * da).sum().backward()
    grads = Fused(gated).backward(h.detach(), da.clone(), row_weight.detach(), overwrite_h=False)
    torch.testing.assert_close(grads.dh, h.grad)
    torch.testing.assert_close(grads.drow_weight_R, row_weight.grad)
    torch.testing.assert_close(grads.weighted_RH, (row_weight[:, None] * a).detach())


@pytest.mark.parametrize("gated", [False, True])
def test_bf16_is_computed_in_float32_and_rounded_once(gated: bool) -> None:
    h = torch.randn(5, 32 * (1 + gated)).bfloat16()
    da, row_weight = torch.randn(5, 32).bfloat16(), torch.rand(5)
    narrow = Fused(gated).backward(h, da, row_weight, overwrite_h=False)
    wide = Fused(gated).backward(h.float(), da.float(), row_weight, overwrite_h=False)
    assert torch.equal(narrow.dh, wide.dh.bfloat16())
    assert torch.equal(narrow.weighted_RH, wide.weighted_RH.bfloat16())
    assert torch.equal(narrow.drow_weight_R, wide.drow_weight_R)


def test_the_torch_path_does_not_change_its_inputs() -> None:
    h, da, row_weight = torch.randn(3, 16), torch.randn(3, 8), torch.rand(3)
    copies = h.clone(), da.clone()
    activate_backward_torch(h, da, row_weight, True)
    assert torch.equal(h, copies[0])
    assert torch.equal(da, copies[1])


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_rows", "n_hidden"), [(1, 8), (37, 1000), (64, 1024), (5, 4104)])
@pytest.mark.parametrize("overwrite_h", [False, True])
def test_fused_kernels_match_the_torch_path(
    gated: bool, dtype: torch.dtype, n_rows: int, n_hidden: int, overwrite_h: bool
) -> None:
    pytest.importorskip("triton")
    from overspill.compute import activation_triton

    h = (3 * torch.randn(n_rows, n_hidden * (1 + gated), device="cuda")).to(dtype)
    da = torch.randn(n_rows, n_hidden, device="cuda").to(dtype)
    row_weight = torch.rand(n_rows, device="cuda")
    rounding = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]

    def close(fused: torch.Tensor, torch_path: torch.Tensor, rtol: float = rounding) -> None:
        torch.testing.assert_close(fused, torch_path, rtol=rtol, atol=rtol)

    close(activation_triton.activate(h, gated), activate_torch(h, gated))
    expected = activate_backward_torch(h, da, row_weight, gated)
    h_before = h.clone()
    weighted, dh, drow_weight = activation_triton.activate_backward(
        h, da, row_weight, gated, overwrite_h
    )
    assert torch.equal(h, h_before) != overwrite_h
    close(weighted, expected.weighted_RH)
    close(dh, expected.dh)
    # Both sums are float32, in a different order.
    torch.testing.assert_close(drow_weight, expected.drow_weight_R, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_fused_gradient_is_finite_where_exp_overflows() -> None:
    pytest.importorskip("triton")
    h = torch.tensor([[-200.0, 200.0] * 8], device="cuda")
    for gated in (False, True):
        da = torch.ones(1, 8 if gated else 16, device="cuda")
        grads = Fused(gated).backward(h, da, torch.ones(1, device="cuda"), overwrite_h=False)
        assert grads.dh.isfinite().all()
        assert Fused(gated).forward(h).isfinite().all()


@pytest.mark.gpu
def test_fused_kernels_take_rows_that_are_not_aligned() -> None:
    pytest.importorskip("triton")
    memory = torch.randn(3 * 48 + 1, device="cuda").bfloat16()
    for start in (0, 1):  # the second one needs another kernel than the first one
        h = memory[start : start + 3 * 48].view(3, 48)
        torch.testing.assert_close(
            Fused(True).forward(h), activate_torch(h, True), rtol=2e-2, atol=2e-2
        )
