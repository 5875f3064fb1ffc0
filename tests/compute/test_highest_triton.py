"""The highest logits compared with torch, in Triton's interpreter and on a GPU."""

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compute.test_grouped_triton import every_device, every_dtype

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
NAN, INF = float("nan"), float("inf")
COUNT = {"cpu": 60, "cuda": 4000}
"""Draws: the interpreter is slow."""


@pytest.fixture
def highest() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute import highest_triton

    return highest_triton.highest


def bits(temperatures: list[float], device: str) -> Tensor:
    return torch.tensor(temperatures).view(torch.int32).to(device, torch.int64)


def numbers(count: int, device: str) -> tuple[Tensor, Tensor]:
    """Seeds and numbers of draws."""
    return torch.arange(count, device=device) + 7, torch.arange(count, device=device)


@every_device
@every_dtype
@pytest.mark.parametrize("n_tokens", [1, 100, 4096, 10_000])
def test_without_noise_the_highest_is_that_of_torch(
    highest: Any, device: str, dtype: torch.dtype, n_tokens: int
) -> None:
    logits = torch.randn(3, n_tokens).to(device, dtype)
    tokens, found = highest(logits, *numbers(3, device), bits([0.0] * 3, device))
    assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.max(-1).values)
    assert torch.equal(tokens, found)


@every_device
@pytest.mark.parametrize("seed", [16390493, 54414807])
def test_the_only_possible_token_is_drawn_with_the_largest_noise(
    highest: Any, device: str, seed: int
) -> None:
    """These seeds give random numbers that are 1 in float32."""
    logits = torch.tensor([[0.0, -INF]], device=device)
    number = torch.zeros(1, dtype=torch.int64, device=device)
    _, found = highest(logits, number + seed, number, bits([1.0], device))
    assert found.tolist() == [0]


@every_device
@pytest.mark.parametrize("temperature", [0.5, 1e-20, pytest.param(1e30, marks=pytest.mark.slow)])
def test_tokens_are_drawn_with_the_probabilities_of_a_softmax(
    highest: Any, device: str, temperature: float
) -> None:
    logits, count = torch.tensor([1.0, -0.5, 2.0, 0.3, 1.9, -INF]), COUNT[device]
    rows = logits.expand(count, -1).to(device)
    seeds = torch.full((count,), 12345, device=device)
    tokens, _ = highest(
        rows, seeds, torch.arange(count, device=device), bits([temperature] * count, device)
    )
    shares = tokens.cpu().bincount(minlength=6) / count
    expected = ((logits - 2.0) / temperature).double().softmax(-1)
    error = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() <= 4.5 * error).all()


@every_device
def test_a_rare_token_among_many_is_drawn_as_often_as_it_should(highest: Any, device: str) -> None:
    n_tokens, count = 8192, COUNT[device]
    logits = torch.zeros(count, n_tokens, device=device)
    logits[:, : n_tokens // 2] = 1.0
    seeds = torch.arange(count, device=device)
    tokens, _ = highest(logits, seeds, 0 * seeds, bits([1.0] * count, device))
    share = (tokens < n_tokens // 2).double().mean().item()
    expected = math.e / (1 + math.e)
    assert abs(share - expected) <= 4.5 * math.sqrt(expected * (1 - expected) / count)
    assert len(tokens.unique()) > 0.7 * count


@every_device
def test_a_draw_depends_on_seed_and_number_only(highest: Any, device: str) -> None:
    logits = torch.zeros(1, 5000, device=device).expand(6, -1)
    seeds = torch.tensor([1, 1, 1, 2, 1, 1 << 62], device=device)
    counts = torch.tensor([0, 1, 0, 0, 2, 0], device=device)
    heat = bits([1.0] * 6, device)
    tokens, _ = highest(logits, seeds, counts, heat)
    assert tokens[0] == tokens[2]
    assert len(tokens.unique()) == 5
    alone, _ = highest(logits[:1], seeds[4:5], counts[4:5], heat[:1])
    assert alone[0] == tokens[4]


@every_device
def test_the_first_of_equal_logits_is_chosen(highest: Any, device: str) -> None:
    logits = torch.zeros(2, 9000, device=device)
    logits[0, [5000, 8000]] = 1.0
    tokens, found = highest(logits, *numbers(2, device), bits([0.0] * 2, device))
    assert tokens.tolist() == found.tolist() == [5000, 0]


@every_device
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_numbers_that_are_not_finite(
    highest: Any, device: str, temperature: float, bad: float
) -> None:
    logits = torch.zeros(3, 5000, device=device)
    logits[1, 4999] = bad
    tokens, found = highest(logits, *numbers(3, device), bits([temperature] * 3, device))
    assert [token >= 0 for token in found.tolist()] == [True, bad == -INF, True]
    assert all(0 <= token < 5000 for token in tokens.tolist())


@every_device
def test_a_row_without_a_token(highest: Any, device: str) -> None:
    logits = torch.full((1, 10), -INF, device=device)
    tokens, found = highest(logits, *numbers(1, device), bits([1.0], device))
    assert found.item() == -1
    assert 0 <= tokens.item() < 10
