"""Sums of the gradients of weights over several waves."""

import pytest
import torch

from overspill.compute import grouped
from overspill.compute.weight_grad import Computed, Product, WeightGrad


def products(backend: grouped.Backend, dtype: torch.dtype, device: str) -> list[Product]:
    """Return the products of three waves of one expert."""
    generator = torch.Generator().manual_seed(0)
    rows = [5, 64, 11]
    pairs = [
        [torch.randn(n, width, generator=generator).to(device, dtype) for width in (24, 16)]
        for n in rows
    ]
    ends = [torch.tensor([n], dtype=torch.int32, device=device) for n in rows]
    return [
        Product(backend, a, b, end, [n]) for (a, b), end, n in zip(pairs, ends, rows, strict=True)
    ]


def total(grads: list[WeightGrad]) -> torch.Tensor:
    first, *others = grads
    found = first.widened()
    for grad in others:
        grad.add_to(found)
    return found


def expected(grads: list[Product]) -> torch.Tensor:
    return torch.stack([grad.a_RM.double().t() @ grad.b_RN.double() for grad in grads]).sum(0)[None]


def test_sums_are_wide_and_do_not_change_what_they_begin_with() -> None:
    grads = products("single", torch.bfloat16, "cpu")
    first = Computed(grads[0].value())
    before = first.value().clone()
    found = total([first, *grads[1:]])
    assert found.dtype == torch.float32
    assert torch.equal(first.value(), before)
    torch.testing.assert_close(found, expected(grads).float(), rtol=1e-2, atol=0.1)
    alone = total([*products("single", torch.float64, "cpu")])
    assert alone.dtype == torch.float64
    torch.testing.assert_close(alone, expected(products("single", torch.float64, "cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_one_expert_round_no_product_to_16_bits(dtype: torch.dtype) -> None:
    grads = products("single", dtype, "cuda")
    found = total([*grads])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected(grads).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[4096, 0, 9000], [10, 5, 0]])
def test_experts_with_many_rows_round_no_product_to_16_bits(counts: list[int]) -> None:
    n_rows, ends = sum(counts), torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    pairs = [
        [torch.randn(n_rows, width, device="cuda").bfloat16() for width in (24, 16)]
        for _ in range(2)
    ]
    grads = [Product("torch", a, b, ends, counts) for a, b in pairs]
    found, exact = total([*grads]), torch.zeros(3, 24, 16, dtype=torch.float64, device="cuda")
    for grad in grads:
        parts = zip(grad.a_RM.split(counts), grad.b_RN.split(counts), strict=True)
        exact += torch.stack([a.double().t() @ b.double() for a, b in parts])
    sums = sum(counts) >= 2048 * len(counts)  # else each product has the precision of bfloat16
    torch.testing.assert_close(
        found.double(), exact, rtol=1e-4 if sums else 1e-2, atol=1e-2 if sums else 0.5
    )
    assert not found[counts.index(0)].any()
