"""The highest logits compared with torch, in Triton's interpreter and on a GPU."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compute.test_grouped_triton import every_device, every_dtype

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def highest() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute import highest_triton

    return highest_triton.highest


def scores(logits_NV: Tensor, temperatures: list[float], noise_NV: Tensor) -> Tensor:
    """In float64."""
    rows = []
    for row, noise, temperature in zip(logits_NV, noise_NV, temperatures, strict=True):
        wide = row.double()
        rows.append(wide / temperature - noise.double().log() if temperature else wide)
    return torch.stack(rows)


@every_device
@every_dtype
@pytest.mark.parametrize("n_tokens", [1, 100, 4096, 10_000])
def test_highest_is_that_of_torch(
    highest: Any, device: str, dtype: torch.dtype, n_tokens: int
) -> None:
    temperatures = [0.0, 1.0, 0.3, 1e-20, 1e30]
    logits = torch.randn(5, n_tokens).to(dtype)
    noise = torch.empty(5, n_tokens).exponential_()
    tokens, found = highest(
        logits.to(device), torch.tensor(temperatures, device=device), noise.to(device)
    )
    expected = scores(logits, temperatures, noise)
    chosen = expected[torch.arange(5), tokens.cpu()]
    torch.testing.assert_close(chosen, expected.max(-1).values, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens, found)


@every_device
def test_the_first_of_equal_logits_is_chosen(highest: Any, device: str) -> None:
    logits = torch.zeros(2, 9000, device=device)
    logits[0, [5000, 8000]] = 1.0
    tokens, found = highest(logits, torch.zeros(2, device=device), logits)
    assert tokens.tolist() == found.tolist() == [5000, 0]


@every_device
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_numbers_that_are_not_finite(
    highest: Any, device: str, temperature: float, bad: float
) -> None:
    logits = torch.zeros(3, 5000, device=device)
    logits[1, 4999] = bad
    tokens, found = highest(
        logits, torch.full((3,), temperature, device=device), torch.ones_like(logits)
    )
    assert found.tolist() == [0, 0 if bad == -INF else -1, 0]
    assert all(0 <= token < 5000 for token in tokens.tolist())


@every_device
def test_a_row_without_a_token(highest: Any, device: str) -> None:
    logits = torch.full((1, 10), -INF, device=device)
    tokens, found = highest(logits, torch.ones(1, device=device), torch.ones_like(logits))
    assert found.item() == -1
    assert 0 <= tokens.item() < 10
