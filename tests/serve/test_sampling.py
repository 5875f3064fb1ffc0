"""The choice of tokens against a naive reference."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from overspill import SamplingParams
from overspill.serve.sampling import Choice, Draw
from tests.slow import slow_rows

LOGITS = [1.0, -0.5, 2.0, 0.3, 1.9, -math.inf]
DRAWS = 1000


def choose(logits: Tensor, *draws: Draw | SamplingParams) -> tuple[Any, Any]:
    """The token of each row, and the logarithms of probabilities."""
    given = [each if isinstance(each, Draw) else Draw(each, 0, 0) for each in draws]
    choice = Choice(logits, given)
    tokens = choice.tokens()
    return tokens, choice.logprobs(tokens)


def naive(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The probability of each token, in plain Python."""
    highest = max(logits)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    kept = order[: top_k or len(order)]
    total, before, chosen = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if before < top_p * total:
            chosen.append(token)
        before += weights[token]
    total = sum(weights[token] for token in chosen)
    return [weights[token] / total if token in chosen else 0.0 for token in range(len(logits))]


def draw(logits: list[float], count: int, seed: int = 0, **params: Any) -> list[int]:
    """So many draws of one request."""
    given = SamplingParams(**params)
    rows = torch.tensor([logits]).expand(count, -1)
    tokens, _ = choose(rows, *(Draw(given, seed, number) for number in range(count)))
    assert None not in tokens
    return tokens  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    slow_rows(
        [
            (0.5, 0, 1.0), (1.0, 0, 1.0), (3.0, 2, 1.0), (1.0, 2, 1.0), (0.5, 0, 0.7),
            (3.0, 0, 0.7), (1.0, 4, 0.6), (3.0, 4, 0.6), (0.5, 99, 0.95),
        ],
        3, 4, 6,
    ),
)  # fmt: skip
def test_tokens_have_the_probabilities_of_the_reference(
    temperature: float, top_k: int, top_p: float
) -> None:
    expected = naive(LOGITS, temperature, top_k, top_p)
    found = Counter(draw(LOGITS, DRAWS, temperature=temperature, top_k=top_k, top_p=top_p))
    for token, probability in enumerate(expected):
        error = math.sqrt(probability * (1 - probability) / DRAWS)
        assert abs(found[token] / DRAWS - probability) <= 4.5 * error, token


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=8),
    st.floats(0.05, 4),
    st.integers(0, 9),
    st.floats(0.05, 1),
)
def test_only_tokens_of_the_reference_are_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    probabilities = naive(logits, temperature, top_k, top_p)
    ties = {logit for logit in logits if logits.count(logit) > 1}
    # a sum may be just below top_p in one computation, just above it in the other
    wider = naive(logits, temperature, top_k, min(1.0, top_p + 1e-4))
    for token in draw(logits, 20, temperature=temperature, top_k=top_k, top_p=top_p):
        assert probabilities[token] > 0 or wider[token] > 0 or logits[token] in ties


@pytest.mark.parametrize("value", [1e-300, 1e-45, 1e-30, 1e-10])
def test_a_tiny_temperature_or_top_p_takes_the_likeliest(value: float) -> None:
    assert set(draw(LOGITS, 50, temperature=value)) == {2}
    assert set(draw(LOGITS, 50, temperature=1.0, top_p=value)) == {2}
    assert set(draw(LOGITS, 50, temperature=value, top_p=value, top_k=3)) == {2}


def test_a_huge_temperature_draws_evenly_from_tokens_that_are_possible() -> None:
    found = Counter(draw(LOGITS, DRAWS, temperature=1e300))
    assert set(found) == {0, 1, 2, 3, 4}
    assert min(found.values()) > DRAWS / 5 * 0.7


def test_without_temperature_the_likeliest_is_taken_whatever_else_is_asked() -> None:
    rows = torch.tensor([LOGITS, LOGITS[::-1]])
    params = [SamplingParams(), SamplingParams(top_k=3, top_p=0.1, seed=5)]
    assert choose(rows, *params)[0] == [2, 3]


def test_a_request_draws_the_same_alone_and_beside_others() -> None:
    random = torch.Generator().manual_seed(3)
    steps = [torch.randn(4, 50, generator=random) for _ in range(12)]
    options: list[dict[str, Any]] = [{"top_k": 5}, {}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}]
    params = [SamplingParams(temperature=1.0, **each) for each in options]
    alone = [
        [choose(rows[[row]], Draw(each, row, number))[0][0] for number, rows in enumerate(steps)]
        for row, each in enumerate(params)
    ]
    together = [
        choose(rows, *(Draw(each, row, number) for row, each in enumerate(params)))[0]
        for number, rows in enumerate(steps)
    ]
    assert [list(each) for each in zip(*together, strict=True)] == alone
    others = [choose(rows[[1]], Draw(params[1], 9, n))[0][0] for n, rows in enumerate(steps)]
    assert alone[1] != others


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_logprobs_are_of_the_token_and_of_the_likeliest(count: int) -> None:
    params = SamplingParams(logprobs=count)
    logits = torch.tensor([LOGITS])
    (token,), (found,) = choose(logits, params)
    logs: Tensor = logits[0].log_softmax(-1)
    likeliest = logs.argsort(descending=True)[:count].tolist()
    assert found is not None
    assert set(found) == {token, *likeliest}
    for each, log in found.items():
        assert log == pytest.approx(float(logs[each]), rel=1e-5)


def test_logprobs_are_those_of_the_model_at_any_temperature() -> None:
    params = SamplingParams(logprobs=6, temperature=5.0, top_k=2)
    (token,), (found,) = choose(torch.tensor([LOGITS]), params)
    assert found is not None
    assert len(found) == 6
    expected = torch.tensor(LOGITS).log_softmax(-1)
    assert [found[each] for each in range(6)] == pytest.approx(expected.tolist(), rel=1e-5)
    assert token in found


def test_only_requests_that_ask_get_logprobs() -> None:
    rows = torch.tensor([LOGITS, LOGITS])
    _, logs = choose(rows, SamplingParams(), SamplingParams(logprobs=1))
    assert logs[0] is None
    assert logs[1] is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 3])
def test_a_row_that_is_not_finite_has_no_token_and_others_have_theirs(
    temperature: float, value: float, at: int
) -> None:
    bad = [*LOGITS]
    bad[at] = value
    rows = torch.tensor([LOGITS, bad, LOGITS])
    params = [SamplingParams(logprobs=1), SamplingParams(temperature=temperature, logprobs=1)]
    tokens, logprobs = choose(rows, *params, params[0])
    assert tokens == [2, None, 2]
    assert logprobs[1] is None


def test_a_row_without_any_possible_token_has_none() -> None:
    rows = torch.full((1, 4), -math.inf)
    params = SamplingParams(temperature=1.0)
    assert choose(rows, params)[0] == [None]


def test_half_precision_is_enough() -> None:
    assert choose(torch.tensor([LOGITS], dtype=torch.bfloat16), SamplingParams())[0] == [2]
