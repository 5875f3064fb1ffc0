"""Chooses the next token of each request."""

from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.serve.params import SamplingParams

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures beyond these differ in nothing, but are not numbers of float32."""


class Choice:
    """The next token of each row of logits. The host need not wait for it."""

    def __init__(
        self,
        logits_NV: Tensor,
        params: Sequence[SamplingParams],
        generators: Sequence[torch.Generator | None],
    ) -> None:
        """A request draws with a generator of its own: what runs beside it changes nothing."""
        self._params = params
        self._logits_NV = logits_NV = logits_NV.float()
        highest_N, chosen_N = logits_NV.max(-1)
        for row, each in enumerate(params):
            if each.temperature > 0:
                chosen_N[row] = _draw(logits_NV[row] - highest_N[row], each, generators[row])
        self.tokens_N = chosen_N
        """On the device; of a row without finite logits it is any token."""
        # a maximum is NaN if one of the values is; one copy from the device for both
        self._found = torch.where(highest_N.isfinite(), chosen_N, -1)
        self._event: torch.cuda.Event | None = None
        if self._found.is_cuda:
            host = torch.empty(self._found.shape, dtype=torch.int64, pin_memory=True)
            self._found = host.copy_(self._found, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def needs_logits(self) -> bool:
        """Whether `logprobs` reads the logits."""
        return any(each.logprobs is not None for each in self._params)

    def tokens(self) -> list[int | None]:
        """Waits for the tokens; None for a row whose logits are NaN or infinite."""
        if self._event is not None:
            self._event.synchronize()
        return [None if token < 0 else token for token in self._found.tolist()]

    def logprobs(self, tokens: Sequence[int | None]) -> list[dict[int, float] | None]:
        """The logarithms of probabilities, for the requests that ask for them."""
        return [
            None if token is None or each.logprobs is None
            else _logprobs(row_V, token, each.logprobs)
            for row_V, token, each in zip(self._logits_NV, tokens, self._params, strict=True)
        ]  # fmt: skip


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
