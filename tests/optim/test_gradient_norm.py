"""The gradient norm is that of torch over all gradients, wherever they are."""

import math

import pytest
import torch

from overspill.optim.gradient_norm import expert_squares, gradient_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_that_of_clip_grad_norm(dtype: torch.dtype) -> None:
    dense = [torch.randn(5, 3).to(dtype), torch.randn(7).to(dtype)]
    experts = [torch.randn(4, 6, 2).to(dtype), torch.randn(4, 2, 6).to(dtype)]  # of 4 experts
    parameters = [torch.nn.Parameter(torch.zeros_like(g.float())) for g in dense + experts]
    for parameter, gradient in zip(parameters, dense + experts, strict=True):
        parameter.grad = gradient.float()
    expected = torch.nn.utils.clip_grad_norm_(parameters, math.inf).item()
    squares = float(expert_squares(experts).double().sum())
    assert gradient_norm(dense, squares) == pytest.approx(expected, rel=1e-6)


def test_processes_can_add_their_squares_before_the_root() -> None:
    gradients = torch.randn(4, 10)
    whole = float(expert_squares([gradients]).double().sum())
    halves = [float(expert_squares([half]).double().sum()) for half in gradients.split(2)]
    assert gradient_norm((), sum(halves)) == pytest.approx(gradient_norm((), whole), rel=1e-14)


def test_the_squares_of_an_expert_do_not_depend_on_its_wave() -> None:
    parts = [torch.randn(5, 33, 7), torch.randn(5, 7, 33)]
    together = expert_squares(parts)
    alone = [expert_squares([part[n : n + 1] for part in parts]) for n in range(5)]
    assert torch.equal(together, torch.cat(alone)), "the same bits"


def test_without_gradients_the_norm_is_zero() -> None:
    assert gradient_norm((), 0.0) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_makes_the_norm_not_finite(bad: float) -> None:
    assert not math.isfinite(gradient_norm([torch.tensor([1.0, bad])], 1.0))
    assert not math.isfinite(gradient_norm([torch.ones(1)], bad))
