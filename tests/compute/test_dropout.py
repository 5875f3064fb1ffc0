"""Dropout of token rows: its random numbers, its rate, its gradients, and its kernel."""

import dataclasses
import importlib.util
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from overspill.compute.dropout import Dropout, RowDropout, Site, philox
from tests.compute.waves import N_EXPERTS, Case, by_autograd, by_waves

WORD = 0xFFFFFFFF


def naive_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as in "Parallel Random Numbers: As Easy as 1, 2, 3"."""
    for _ in range(10):
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            high >> 32 ^ counter[1] ^ key[0], high & WORD, low >> 32 ^ counter[3] ^ key[1],
            low & WORD,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return counter


def test_numbers_are_those_of_philox() -> None:
    # known answers of Random123
    zeros = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert naive_philox([0] * 4, [0] * 2) == zeros
    assert naive_philox([WORD] * 4, [WORD] * 2) == ones
    assert philox(0, torch.tensor([0]), 4, 0).tolist() == [zeros]
    seed, rows, quarter = 0x123456789ABCDEF1, [0, 77, (1 << 31) - 1], 3
    found = philox(seed, torch.tensor(rows), 11, 1)
    assert found.shape == (3, 11)
    for row, numbers in zip(rows, found.tolist(), strict=True):
        words = [naive_philox([n, row, 1, 0], [seed & WORD, seed >> 32]) for n in range(quarter)]
        assert numbers == [words[n][part] for part in range(4) for n in range(quarter)][:11]


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_elements_are_dropped_at_the_rate_and_independently(rate: float) -> None:
    rows, columns = torch.arange(600), 700
    masks = [
        RowDropout(rate, seed, site, rows).mask(columns).double()
        for seed, site in ((5, Site.HIDDEN), (5, Site.OUTPUT), (6, Site.HIDDEN))
    ]
    spread = math.sqrt(rate * (1 - rate))

    def assert_near_zero(values: Tensor, deviation: float, count: int) -> None:
        assert values.abs().max() < 5.5 * deviation / math.sqrt(count)

    for mask in masks:
        off = mask - (1 - rate)
        assert_near_zero(off.mean(), spread, off.numel())
        assert_near_zero(off.mean(0), spread, len(rows))
        assert_near_zero(off.mean(1), spread, columns)
        assert_near_zero((off[1:] * off[:-1]).mean(), spread**2, off.numel())
        assert_near_zero((off[:, 1:] * off[:, :-1]).mean(), spread**2, off.numel())
        assert_near_zero((off[:, 175:] * off[:, :-175]).mean(), spread**2, off.numel())
    for first, second in ((0, 1), (0, 2), (1, 2)):
        product = (masks[first] - 1 + rate) * (masks[second] - 1 + rate)
        assert_near_zero(product.mean(), spread**2, product.numel())


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize(
    ("gated", "activation"),
    [(False, None), (True, None), (False, torch.relu), (False, lambda h: h)],
    ids=["gelu", "silu", "relu", "identity"],
)
def test_waves_with_dropout_follow_autograd(
    rate: float, gated: bool, activation: Callable[[Tensor], Tensor] | None
) -> None:
    case = Case.make("some without tokens", gated=gated, dtype=torch.float64, activation=activation)
    case = dataclasses.replace(case, dropout=Dropout(seed=9, hidden=rate, output=0.0))
    expected = by_autograd(case)
    for borders in ((0, N_EXPERTS), (0, 1, 4, N_EXPERTS)):
        for kept in (False, True):
            by_waves(case, borders, kept).assert_close(expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bf16_waves_with_dropout_follow_float32_autograd(device: str) -> None:
    """On a GPU by the grouped kernels, and the kernel below."""
    case = Case.make(
        gated=False, dtype=torch.bfloat16, device=device, activation=torch.relu,
        d_model=64, d_hidden=128, n_tokens=99,
    )  # fmt: skip
    case = dataclasses.replace(case, dropout=Dropout(seed=9, hidden=0.3, output=0.0))
    expected = by_autograd(case.wide()).named()
    for name, mine in by_waves(case, (0, 1, 4, N_EXPERTS)).named().items():
        assert (mine.float() - expected[name]).abs().max() <= 2e-2 * expected[name].abs().max(), (
            name
        )


def test_the_seed_is_that_of_torch_and_nothing_is_drawn_without_dropout() -> None:
    torch.manual_seed(3)
    first, second = Dropout.draw(0.1, 0.0), Dropout.draw(0.1, 0.0)
    before = torch.get_rng_state()
    assert Dropout.draw(0.0, 0.0) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert first != second
    torch.manual_seed(3)
    assert Dropout.draw(0.1, 0.0) == first
    assert first is not None
    assert first.of_rows(Site.OUTPUT, torch.arange(4)) is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="Triton compiles for the GPU (run with -m gpu)"
            ),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernel_computes_the_same_bits(device: str, dtype: torch.dtype) -> None:
    from overspill.compute import dropout_triton

    for n_columns, rate, overwrite in ((1, 0.5, False), (1030, 0.1, True), (64, 1.0, False)):
        rows = torch.tensor([5, 0, 123456])
        values = torch.randn(3, n_columns).to(dtype)
        dropout = RowDropout(rate, (1 << 61) + 12345, Site.OUTPUT, rows)
        expected = dropout.apply(values, overwrite=False)
        assert not torch.equal(expected, values)
        given = values.to(device).clone()
        numbers = dropout.seed, dropout.threshold, dropout.scale, int(dropout.site)
        found = dropout_triton.drop(given, rows.to(device), *numbers, overwrite)
        assert torch.equal(found.cpu() == 0, expected == 0)
        # the interpreter does not round to bf16, but cuts off
        cut_off = 2**-7 if device == "cpu" and dtype is torch.bfloat16 else 0.0
        torch.testing.assert_close(found.cpu(), expected, rtol=cut_off, atol=0.0)
        assert (found.data_ptr() == given.data_ptr()) is overwrite
        assert overwrite or torch.equal(given.cpu(), values)
