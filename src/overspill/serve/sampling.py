"""The choice of the next token of each request."""

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.hardware.native import has_triton
from overspill.serve.params import SamplingParams

_COLDEST, _HOTTEST = 1e-20, 1e30
"""Limits of temperatures: beyond them the choice stays the same, but quotients are not finite."""
_SMALLEST = 1e-30
"""Lower limit of noise, whose logarithm is taken."""
_MULTIPLIER, _SEEDS = 0x9E3779B97F4A7C15, 1 << 63


class Draw(NamedTuple):
    """Inputs of the choice of a token beside its logits. The noise is a function of seed and
    number, so the choice does not depend on other requests of the batch, and a token that is
    computed twice is chosen alike."""

    params: SamplingParams
    seed: int  # of the request
    number: int  # of its token
    adjust: Callable[[Tensor], Tensor] | None = None  # logits [V] that are chosen from instead

    @property
    def is_plain(self) -> bool:
        """Whether all tokens are possible, with the probabilities of a softmax."""
        params = self.params
        restricted = params.temperature > 0 and (params.top_k or params.top_p < 1)
        return self.adjust is None and not restricted

    @property
    def temperature(self) -> float:
        """The temperature within limits; 0 takes the likeliest token."""
        if self.params.temperature == 0:
            return 0.0
        return min(max(self.params.temperature, _COLDEST), _HOTTEST)

    def numbers(self) -> tuple[int, int, int]:
        """Return the inputs of a kernel: seed, number, and the bits of the temperature."""
        (bits,) = struct.unpack("<i", struct.pack("<f", self.temperature if self.is_plain else 0.0))
        return self.seed, self.number, bits

    def generator(self, device: torch.device) -> torch.Generator:
        mixed = (self.seed * _MULTIPLIER + self.number) % _SEEDS
        return torch.Generator(device).manual_seed(mixed)


Chosen = tuple[Tensor, Tensor]
"""The token of each row, twice: in the second tensor it is -1 for a row without finite logits."""


class Choice:
    """Next token of each row of logits. The host need not wait for it."""

    def __init__(
        self, logits_NV: Tensor, draws: Sequence[Draw], chosen: Chosen | None = None
    ) -> None:
        """`chosen` are tokens that were drawn together with the logits, as by `choose`."""
        self._params = [draw.params for draw in draws]
        self._adjusts = any(draw.adjust is not None for draw in draws)
        self._logits_NV = logits_NV
        self.tokens_N, self._found = chosen or choose(logits_NV, draws)
        """The tokens on the device; any token for a row without finite logits."""
        for row, draw in enumerate(draws):
            if not draw.is_plain:
                drawn = _draw(logits_NV[row].float(), draw)
                self.tokens_N[row] = drawn
                self._found[row] = torch.where(self._found[row] < 0, -1, drawn)
        self._event: torch.cuda.Event | None = None
        if self._found.is_cuda:
            host = torch.empty(self._found.shape, dtype=torch.int64, pin_memory=True)
            self._found = host.copy_(self._found, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def needs_host(self) -> bool:
        """Whether the next batch must not begin before the host knows the tokens: `logprobs` reads
        the logits, which it overwrites, or its logits are adjusted to the tokens."""
        return self._adjusts or any(each.logprobs is not None for each in self._params)

    def tokens(self) -> list[int | None]:
        """Wait for the tokens, and return them; None for a row whose logits are NaN or infinite."""
        if self._event is not None:
            self._event.synchronize()
        return [None if token < 0 else token for token in self._found.tolist()]

    def logprobs(self, tokens: Sequence[int | None]) -> list[dict[int, float] | None]:
        """Return the logarithms of probabilities, for the requests that ask for them."""
        return [
            None if token is None or each.logprobs is None
            else _logprobs(row_V, token, each.logprobs)
            for row_V, token, each in zip(self._logits_NV, tokens, self._params, strict=True)
        ]  # fmt: skip


def choose(logits_NV: Tensor, draws: Sequence[Draw]) -> Chosen:
    """Return the token with the highest logit / temperature - log(noise) of each row: exponential
    noise draws it with the probability of a softmax. Draws that are not plain get the likeliest
    token."""
    device = logits_NV.device
    if logits_NV.is_cuda and has_triton("sampling"):
        from overspill.compute.highest_triton import highest

        numbers_N3 = torch.tensor([draw.numbers() for draw in draws], device=device)
        return highest(logits_NV, *numbers_N3.t().contiguous())
    scores_NV = logits_NV.float()
    for row, draw in enumerate(draws):
        if draw.temperature > 0 and draw.is_plain:
            noise = torch.empty_like(scores_NV[row])
            noise.exponential_(generator=draw.generator(device))
            noise.clamp_min_(_SMALLEST).log_()
            scores_NV = scores_NV.clone() if scores_NV is logits_NV else scores_NV
            scores_NV[row] = scores_NV[row] / draw.temperature - noise
    values_N, places_N = scores_NV.max(-1)
    return places_N, torch.where(values_N.isfinite(), places_N, -1)


def _draw(logits_V: Tensor, draw: Draw) -> Tensor:
    """Draw a token from adjusted logits, restricted by top-k and top-p."""
    params = draw.params
    if draw.adjust is not None:
        logits_V = draw.adjust(logits_V)
    if draw.temperature == 0:
        return logits_V.argmax(-1)
    probabilities = ((logits_V - logits_V.max()) / draw.temperature).softmax(-1)
    ordered, ids = probabilities.sort(descending=True)
    if params.top_k:
        ordered[params.top_k :] = 0
    if params.top_p < 1:
        # a token is left out if those before it are enough
        before = ordered.cumsum(-1) - ordered
        ordered[1:][before[1:] >= params.top_p * ordered.sum()] = 0
    noise = torch.empty_like(ordered).exponential_(generator=draw.generator(logits_V.device))
    # torch.multinomial makes the host wait for the device, and raises for NaN
    return ids[(ordered / noise.clamp_min_(_SMALLEST)).argmax(-1)]


def _logprobs(logits_V: Tensor, token: int, count: int) -> dict[int, float]:
    logs = logits_V.float().log_softmax(-1)
    values, ids = logs.topk(min(count, len(logs)))
    found = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return {token: float(logs[token])} | found
