"""Chooses the next token of each request."""

from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.serve.params import SamplingParams


def choose(
    logits_NV: Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
) -> tuple[list[int], list[dict[int, float] | None]]:
    """The token of each row, and the logarithms of probabilities for those that ask for them. A
    request draws with a generator of its own: what runs beside it changes nothing."""
    logits_NV = logits_NV.float()
    likeliest = logits_NV.argmax(-1)
    drawn = [row for row, each in enumerate(params) if each.temperature > 0]
    for row in drawn:
        likeliest[row] = _draw(logits_NV[row], params[row], generators[row])
    tokens: list[int] = likeliest.tolist()
    if not bool(torch.isfinite(logits_NV.gather(1, likeliest[:, None])).all()):
        raise NonFiniteError("the model's output is NaN or infinite; check its weights")
    return tokens, [
        None if each.logprobs is None else _logprobs(logits_NV[row], tokens[row], each.logprobs)
        for row, each in enumerate(params)
    ]


def _draw(logits_V: Tensor, params: SamplingParams, generator: torch.Generator | None) -> Tensor:
    probabilities = (logits_V / params.temperature).softmax(-1)
    if params.top_k or params.top_p < 1:
        ordered, ids = probabilities.sort(descending=True)
        if params.top_k:
            ordered[params.top_k :] = 0
        if params.top_p < 1:
            total = ordered.sum()
            # a token is left out if those before it are enough
            ordered[ordered.cumsum(-1) - ordered >= params.top_p * total] = 0
        return ids[torch.multinomial(ordered, 1, generator=generator)[0]]
    return torch.multinomial(probabilities, 1, generator=generator)[0]


def _logprobs(logits_V: Tensor, token: int, count: int) -> dict[int, float]:
    logs = logits_V.log_softmax(-1)
    values, ids = logs.topk(min(count, len(logs)))
    found = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return {token: float(logs[token])} | found
