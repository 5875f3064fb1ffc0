"""Chooses the next token of each request."""

from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.serve.params import SamplingParams

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures beyond these differ in nothing, but are not numbers of float32."""


def choose(
    logits_NV: Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
) -> tuple[list[int | None], list[dict[int, float] | None]]:
    """The token of each row, None if its logits are NaN or infinite, and the logarithms of
    probabilities for those that ask for them. A request draws with a generator of its own: what
    runs beside it changes nothing."""
    logits_NV = logits_NV.float()
    highest_N, chosen_N = logits_NV.max(-1)
    for row, each in enumerate(params):
        if each.temperature > 0:
            chosen_N[row] = _draw(logits_NV[row] - highest_N[row], each, generators[row])
    # a maximum is NaN if one of the values is; one copy from the device for both
    found = torch.where(highest_N.isfinite(), chosen_N, -1).tolist()
    tokens = [None if token < 0 else token for token in found]
    return tokens, [
        None if token is None or each.logprobs is None else _logprobs(row_V, token, each.logprobs)
        for row_V, token, each in zip(logits_NV, tokens, params, strict=True)
    ]


def _draw(logits_V: Tensor, params: SamplingParams, generator: torch.Generator | None) -> Tensor:
    """One token; the highest of `logits` is 0."""
    temperature = min(max(params.temperature, _COLDEST), _HOTTEST)
    probabilities = (logits_V / temperature).softmax(-1)
    if not params.top_k and params.top_p == 1:
        return _multinomial(probabilities, generator)
    ordered, ids = probabilities.sort(descending=True)
    if params.top_k:
        ordered[params.top_k :] = 0
    if params.top_p < 1:
        # a token is left out if those before it are enough
        before = ordered.cumsum(-1) - ordered
        ordered[1:][before[1:] >= params.top_p * ordered.sum()] = 0
    return ids[_multinomial(ordered, generator)]


def _multinomial(weights_V: Tensor, generator: torch.Generator | None) -> Tensor:
    """As torch.multinomial, which makes the host wait for the device, and raises for NaN."""
    noise = torch.empty_like(weights_V).exponential_(generator=generator)
    return (weights_V / noise.clamp_min_(_COLDEST)).argmax(-1)  # 0 / 0 would be chosen


def _logprobs(logits_V: Tensor, token: int, count: int) -> dict[int, float]:
    logs = logits_V.log_softmax(-1)
    values, ids = logs.topk(min(count, len(logs)))
    found = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return {token: float(logs[token])} | found
