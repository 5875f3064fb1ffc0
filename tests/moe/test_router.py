"""Routing: weights, ties to the balance loss, gradients."""

import pytest
import torch

from overspill.moe.router import Router, balance_loss


@pytest.mark.parametrize(("top_k", "normalize"), [(1, True), (2, False), (2, True), (4, True)])
def test_weights_are_the_largest_probabilities(top_k: int, normalize: bool) -> None:
    router = Router(16, 8, top_k, normalize)
    x = torch.randn(20, 16)
    out = router(x)
    probs = (x @ router.weight.t()).softmax(-1)
    largest, ids = probs.sort(-1, descending=True)
    assert torch.equal(out.expert_ids_TK, ids[:, :top_k])
    expected = largest[:, :top_k]
    if normalize and top_k > 1:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(out.weights_TK, expected)


@pytest.mark.parametrize("top_k", [1, 2])
def test_router_gets_a_gradient_from_the_weights(top_k: int) -> None:
    router = Router(16, 8, top_k)
    out = router(torch.randn(20, 16))
    out.weights_TK[:, 0].sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.any()


def test_bf16_model_routes_in_float32() -> None:
    router = Router(16, 8, 2, dtype=torch.bfloat16)
    x = torch.randn(20, 16).bfloat16()
    out = router(x)
    assert out.weights_TK.dtype is torch.float32
    assert out.balance_loss.dtype is torch.float32
    wide = Router(16, 8, 2)
    with torch.no_grad():
        wide.weight.copy_(router.weight)
    assert torch.equal(out.weights_TK, wide(x.float()).weights_TK)


def test_balance_loss_is_one_for_even_load_and_e_for_the_worst() -> None:
    ids = torch.arange(8).view(8, 1)
    even = torch.full((8, 8), 1 / 8)
    assert balance_loss(even, ids).item() == pytest.approx(1.0)
    worst = torch.zeros(8, 8)
    worst[:, 3] = 1.0
    assert balance_loss(worst, torch.full((8, 1), 3)).item() == pytest.approx(8.0)


def test_balance_loss_of_pieces_is_the_mean_over_micro_batches() -> None:
    router = Router(16, 8, 2)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(4, 10, 16)
    grouped = router(x.view(40, 16), pieces=4).balance_loss
    single = torch.stack([router(piece).balance_loss for piece in x]).mean()
    torch.testing.assert_close(grouped, single)
    assert not torch.isclose(grouped, router(x.view(40, 16)).balance_loss, rtol=1e-4)


@pytest.mark.parametrize("at_once", [1 << 24, 48])
def test_16_bit_gradients_are_those_of_float32_copies(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, and three tokens at a time."""
    monkeypatch.setattr("overspill.moe.router._WIDE_AT_ONCE", at_once)
    router = Router(16, 8, 2, dtype=torch.bfloat16)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(20, 16, dtype=torch.bfloat16, requires_grad=True)
    wide = Router(16, 8, 2)
    wide.load_state_dict(router.state_dict())
    x_wide = x.detach().float().requires_grad_()
    for module, tokens in ((router, x), (wide, x_wide)):
        out = module(tokens)
        (out.weights_TK.square().sum() + out.balance_loss).backward()
    assert x.grad is not None
    assert x_wide.grad is not None
    assert torch.equal(x.grad, x_wide.grad.bfloat16())
    torch.testing.assert_close(router.weight.grad, wide.weight.grad.bfloat16(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("frozen", ["weight", "x", "both"])
def test_frozen_16_bit_routers_and_inputs_get_no_gradient(frozen: str) -> None:
    router = Router(16, 8, 2, dtype=torch.bfloat16)
    x = torch.randn(20, 16, dtype=torch.bfloat16)
    router.weight.requires_grad_(frozen == "x")
    x.requires_grad_(frozen == "weight")
    weights = router(x).weights_TK
    assert weights.requires_grad == (frozen != "both")
    if weights.requires_grad:
        weights[:, 0].sum().backward()
    assert (router.weight.grad is not None) == (frozen == "x")
    assert (x.grad is not None) == (frozen == "weight")


def test_16_bit_tokens_are_kept_as_they_are_for_backward() -> None:
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(20, 16, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        Router(16, 8, 2, dtype=torch.bfloat16)(x)
    of_tokens = [tensor for tensor in saved if tensor.shape == x.shape]
    assert of_tokens
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in of_tokens)
