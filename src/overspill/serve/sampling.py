"""Chooses the next token of each request."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from overspill.hardware.native import has_triton
from overspill.serve.params import SamplingParams

_COLDEST, _HOTTEST = 1e-20, 1e30
"""Temperatures beyond these differ in nothing, but logits divided by them are not finite."""
_SMALLEST = 1e-30
"""Noise, which is not 0."""


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
        self._logits_NV = logits_NV
        plain = [not each.top_k and each.top_p == 1 for each in params]
        temperatures = [
            _temperature(each) if own else 0.0 for each, own in zip(params, plain, strict=True)
        ]
        noise_NV: Tensor | None = None
        if any(temperatures):
            noise_NV = torch.empty_like(logits_NV, dtype=torch.float32)
            for row, temperature in enumerate(temperatures):
                if temperature > 0:
                    noise_NV[row].exponential_(generator=generators[row])
                else:
                    noise_NV[row] = 1.0
        heat_N = _on_device(tuple(temperatures), logits_NV.device)
        self.tokens_N, self._found = _highest(logits_NV, heat_N, noise_NV)
        """On the device; of a row without finite logits it is any token."""
        for row, each in enumerate(params):
            if each.temperature > 0 and not plain[row]:
                drawn = _draw(logits_NV[row].float(), each, generators[row])
                self.tokens_N[row] = drawn
                self._found[row] = torch.where(self._found[row] < 0, -1, drawn)
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


def _temperature(params: SamplingParams) -> float:
    if params.temperature == 0:
        return 0.0
    return min(max(params.temperature, _COLDEST), _HOTTEST)


@lru_cache(64)
def _on_device(temperatures: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it outlives this batch
        return torch.tensor(temperatures, dtype=torch.float32, device=device)


def _highest(logits_NV: Tensor, heat_N: Tensor, noise_NV: Tensor | None) -> tuple[Tensor, Tensor]:
    """The token with the highest logit / temperature - log(noise) of each row: drawn with the
    probability of a softmax, if the noise is exponential. The same again, but -1 for a row with a
    logit that is NaN, or without a finite one. A row with temperature 0 has no noise."""
    if logits_NV.is_cuda and has_triton("sampling"):
        from overspill.compute.highest_triton import highest

        return highest(logits_NV, heat_N, logits_NV if noise_NV is None else noise_NV)
    scores_NV = logits_NV.float()
    if noise_NV is not None:
        divisor_N1 = torch.where(heat_N > 0, heat_N, 1.0)[:, None]
        scores_NV = scores_NV / divisor_N1 - noise_NV.clamp_min_(_SMALLEST).log_()
    values_N, places_N = scores_NV.max(-1)
    return places_N, torch.where(values_N.isfinite(), places_N, -1)


def _draw(logits_V: Tensor, params: SamplingParams, generator: torch.Generator | None) -> Tensor:
    """One token of those that top-k and top-p leave."""
    probabilities = ((logits_V - logits_V.max()) / _temperature(params)).softmax(-1)
    ordered, ids = probabilities.sort(descending=True)
    if params.top_k:
        ordered[params.top_k :] = 0
    if params.top_p < 1:
        # a token is left out if those before it are enough
        before = ordered.cumsum(-1) - ordered
        ordered[1:][before[1:] >= params.top_p * ordered.sum()] = 0
    noise = torch.empty_like(ordered).exponential_(generator=generator)
    # torch.multinomial makes the host wait for the device, and raises for NaN
    return ids[(ordered / noise.clamp_min_(_SMALLEST)).argmax(-1)]


def _logprobs(logits_V: Tensor, token: int, count: int) -> dict[int, float]:
    logs = logits_V.float().log_softmax(-1)
    values, ids = logs.topk(min(count, len(logs)))
    found = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return {token: float(logs[token])} | found
