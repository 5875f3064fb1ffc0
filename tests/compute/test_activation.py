"""The activation compared with autograd, and the fused kernels compared with torch."""

import pytest
import torch
from torch import nn

from overspill.compute.activation import (
    Differentiated,
    Fused,
    activate_backward_torch,
    activate_torch,
    activation_named,
    form_of,
    function_of,
    limited_gate,
)
from overspill.compute.activation_form import Form, Function
from overspill.core.errors import ConfigError
from tests.compute.activations import FORMS, activation_oracle, every_form
from tests.compute.decode.near import needs_triton
from tests.compute.test_grouped_triton import every_device
from tests.pairs import all_pairs


@every_form
def test_backward_is_the_gradient_of_the_weighted_activation(form: Form) -> None:
    fused = Fused(form.gated, form.function)
    h = torch.randn(7, 48 if form.gated else 24, dtype=torch.float64)
    h[:, 3:5] = 0.0
    h.requires_grad_()
    row_weight = torch.rand(7, dtype=torch.float64, requires_grad=True)
    da = torch.randn(7, 24, dtype=torch.float64)
    a = activation_oracle(h, form)
    torch.testing.assert_close(fused.forward(h.detach()), a)
    (row_weight[:, None] * a * da).sum().backward()
    grads = fused.backward(h.detach(), da.clone(), row_weight.detach(), overwrite_h=False)
    torch.testing.assert_close(grads.dh, h.grad)
    torch.testing.assert_close(grads.drow_weight_R, row_weight.grad)
    torch.testing.assert_close(grads.weighted_RH, (row_weight[:, None] * a).detach())


@every_form
def test_bf16_is_computed_in_float32_and_rounded_once(form: Form) -> None:
    fused = Fused(form.gated, form.function)
    h = torch.randn(5, 32 * (1 + form.gated)).bfloat16()
    da, row_weight = torch.randn(5, 32).bfloat16(), torch.rand(5)
    narrow = fused.backward(h, da, row_weight, overwrite_h=False)
    wide = fused.backward(h.float(), da.float(), row_weight, overwrite_h=False)
    assert torch.equal(narrow.dh, wide.dh.bfloat16())
    assert torch.equal(narrow.weighted_RH, wide.weighted_RH.bfloat16())
    assert torch.equal(narrow.drow_weight_R, wide.drow_weight_R)


def test_the_torch_path_does_not_change_its_inputs() -> None:
    h, da, row_weight = torch.randn(3, 16), torch.randn(3, 8), torch.rand(3)
    copies = h.clone(), da.clone()
    activate_backward_torch(h, da, row_weight, Form.usual(True))
    assert torch.equal(h, copies[0])
    assert torch.equal(da, copies[1])


@needs_triton
@every_device
@pytest.mark.parametrize(
    ("form", "dtype", "sizes", "overwrite_h"),
    all_pairs(
        FORMS,
        [torch.float32, torch.bfloat16, torch.float16],
        [(1, 8), (3, 1000), (17, 1024), (5, 4105)],
        [False, True],
    ),
)
def test_fused_kernels_match_the_torch_path(
    form: Form, dtype: torch.dtype, sizes: tuple[int, int], overwrite_h: bool, device: str
) -> None:
    from overspill.compute import activation_triton

    n_rows, n_hidden = sizes
    h = (3 * torch.randn(n_rows, n_hidden * (1 + form.gated), device=device)).to(dtype)
    h[:, 3:5] = 0.0
    da = torch.randn(n_rows, n_hidden, device=device).to(dtype)
    row_weight = torch.rand(n_rows, device=device)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]

    def close(fused: torch.Tensor, torch_path: torch.Tensor, rtol: float = rounding) -> None:
        torch.testing.assert_close(fused, torch_path, rtol=rtol, atol=rtol)

    close(activation_triton.activate(h, form), activate_torch(h, form))
    expected = activate_backward_torch(h, da, row_weight, form)
    h_before = h.clone()
    weighted, dh, drow_weight = activation_triton.activate_backward(
        h, da, row_weight, form, overwrite_h
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
    for form in FORMS:
        fused = Fused(form.gated, form.function)
        da = torch.ones(1, 8 if form.gated else 16, device="cuda")
        grads = fused.backward(h, da, torch.ones(1, device="cuda"), overwrite_h=False)
        assert grads.dh.isfinite().all()
        assert fused.forward(h).isfinite().all()


@pytest.mark.gpu
def test_fused_kernels_take_rows_that_are_not_aligned() -> None:
    pytest.importorskip("triton")
    memory = torch.randn(3 * 48 + 1, device="cuda").bfloat16()
    for start in (0, 1):  # the second one needs another kernel than the first one
        h = memory[start : start + 3 * 48].view(3, 48)
        torch.testing.assert_close(
            Fused(True).forward(h), activate_torch(h, Form.usual(True)), rtol=2e-2, atol=2e-2
        )


def test_modules_are_recognized_by_what_they_compute() -> None:
    from transformers.activations import ACT2FN

    names = {"gelu": Function.GELU, "silu": Function.SILU, "swish": Function.SILU}
    names |= {"relu": Function.RELU, "relu2": Function.RELU2}
    for name in ACT2FN:
        assert function_of(ACT2FN[name]) is names.get(name), name
    assert function_of(nn.PReLU(init=0.0)) is None  # now it computes ReLU; training may change that


def test_kernels_have_the_form_of_an_activation() -> None:
    assert form_of(None, gated=True) == (Function.SILU, True)
    assert form_of(None, gated=False) == (Function.GELU, False)
    assert form_of(activation_named("relu", gated=True), gated=True) == (Function.RELU, True)
    own = Differentiated(limited_gate)
    assert form_of(own, gated=True) == (Function.LIMITED, True)
    assert form_of(Differentiated(lambda h: 2 * limited_gate(h)), gated=True) is None
    with pytest.raises(ConfigError, match=r"='xielu' must be one of gelu, silu, relu, relu2"):
        activation_named("xielu", gated=False)
