"""The reference implementation, compared with a loop over tokens."""

import pytest
import torch
import torch.nn.functional as F

from overspill.compute.reference import moe_reference


@pytest.mark.parametrize("gated", [False, True])
def test_reference_is_the_sum_over_each_tokens_experts(gated: bool) -> None:
    x = torch.randn(9, 8, dtype=torch.float64)
    ids = torch.rand(9, 4).topk(2).indices
    weights = torch.rand(9, 2, dtype=torch.float64)
    w_in = torch.randn(4, 12 * (1 + gated), 8, dtype=torch.float64)
    w_out = torch.randn(4, 8, 12, dtype=torch.float64)
    y = moe_reference(x, ids, weights, w_in, w_out, gated)
    for t in range(9):
        expected = torch.zeros(8, dtype=torch.float64)
        for k in range(2):
            e = ids[t, k]
            h = w_in[e] @ x[t]
            a = F.silu(h[:12]) * h[12:] if gated else F.gelu(h)
            expected += weights[t, k] * (w_out[e] @ a)
        torch.testing.assert_close(y[t], expected)


def test_expert_without_tokens_has_a_gradient_of_zeros_not_none() -> None:
    w_in, w_out = torch.randn(3, 4, 2, requires_grad=True), torch.randn(3, 2, 4, requires_grad=True)
    ids = torch.zeros(5, 1, dtype=torch.int64)
    moe_reference(torch.randn(5, 2), ids, torch.ones(5, 1), w_in, w_out, False).sum().backward()
    assert w_in.grad is not None
    assert w_in.grad[0].any()
    assert not w_in.grad[1:].any()
