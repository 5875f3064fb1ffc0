"""The chunked loss against F.cross_entropy, gradients included."""

import pytest
import torch
import torch.nn.functional as F

from overspill.models.loss import IGNORE, fused_linear_cross_entropy


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(30, 16).to(dtype).requires_grad_()
    weight = torch.randn(50, 16).to(dtype).requires_grad_()
    targets = torch.randint(50, (30,))
    targets[[0, 7, 29]] = IGNORE
    return x, weight, targets


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 50 * 4, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loss_and_gradients_are_those_of_cross_entropy(
    chunk_bytes: int, dtype: torch.dtype
) -> None:
    x, weight, targets = inputs(dtype)
    loss = fused_linear_cross_entropy(x, weight, targets, chunk_bytes)
    dx, dw = torch.autograd.grad(3 * loss, (x, weight))
    wide = torch.promote_types(dtype, torch.float32)
    expected = F.cross_entropy((x @ weight.t()).to(wide), targets)
    expected_dx, expected_dw = torch.autograd.grad(3 * expected, (x, weight))
    assert loss.dtype is wide
    torch.testing.assert_close(loss, expected)
    assert dx.dtype is dtype
    assert dw.dtype is dtype
    rtol, atol = (2e-2, 2e-3) if dtype is torch.bfloat16 else (1e-5, 1e-6)
    torch.testing.assert_close(dx, expected_dx, rtol=rtol, atol=atol)
    torch.testing.assert_close(dw, expected_dw, rtol=rtol, atol=atol)


def test_pieces_give_the_mean_of_means() -> None:
    x, weight, targets = inputs(torch.float64)
    loss = fused_linear_cross_entropy(x, weight, targets, pieces=3)
    logits = (x @ weight.t()).view(3, 10, 50)
    expected = sum(F.cross_entropy(logits[i], targets.view(3, 10)[i]) for i in range(3)) / 3
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(
        torch.autograd.grad(loss, (x, weight)),
        torch.autograd.grad(expected, (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_no_gradient_is_computed_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = inputs(torch.float32)
    with_grad = fused_linear_cross_entropy(x, weight, targets)
    monkeypatch.setattr(torch, "mm", None)  # only gradients use it
    with torch.no_grad():
        loss = fused_linear_cross_entropy(x, weight, targets)
    assert not loss.requires_grad
    assert torch.equal(loss, with_grad.detach())


def test_only_the_asked_gradient_is_computed() -> None:
    x, weight, targets = inputs(torch.float32)
    loss = fused_linear_cross_entropy(x.detach(), weight, targets)
    loss.backward()
    assert weight.grad is not None
    frozen = fused_linear_cross_entropy(x, weight.detach(), targets)
    frozen.backward()
    assert x.grad is not None


def test_backward_twice_gives_the_same_gradient() -> None:
    x, weight, targets = inputs(torch.float32)
    loss = fused_linear_cross_entropy(x, weight, targets)
    first = torch.autograd.grad(2 * loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(2 * loss, x)[0], first)


def test_all_targets_ignored_is_zero_not_nan() -> None:
    x, weight, _ = inputs(torch.float32)
    loss = fused_linear_cross_entropy(x, weight, torch.full((30,), IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert not x.grad.any()
