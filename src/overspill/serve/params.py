"""How tokens are chosen, and what a request gives back."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from overspill.core.errors import ConfigError

_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen; the names are those of vLLM.

    `temperature=0` takes the likeliest token. `top_k=0` and `top_p=1` do not restrict the choice.
    With a `seed` a request gives the same tokens again, whatever runs beside it. `stop` ends the
    text before one of these strings. `logprobs=n` returns the logarithms of the probabilities of
    each token and of the n likeliest. `ignore_eos` goes on after the end of the text.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1)
        _whole("top_k", self.top_k, 0)
        if not _is_number(self.temperature) or not 0 <= self.temperature <= _LARGEST:
            raise ConfigError(
                f"temperature={self.temperature!r} must be a finite number of at least 0; 0 takes "
                "the likeliest token"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p!r} must be above 0 and at most 1")
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63))
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0)
        several = self.stop is None or isinstance(self.stop, str | list | tuple)
        if not several or not all(isinstance(text, str) and text for text in self.stops):
            raise ConfigError(f"stop={self.stop!r} must be a string or several, none empty")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos={self.ignore_eos!r} must be True or False")

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ConfigError(
            f"{name}={value!r} must be a whole number of at least {least} and below 2**63"
        )


@dataclass
class Result:
    """What a request gave."""

    text: str
    token_ids: list[int]
    finish_reason: str
    """"stop" (the end of the text, or a stop string) or "length"."""
    prompt_tokens: int
    logprobs: list[dict[int, float]] | None = None
    """For each token: the token itself and the likeliest ones."""


@dataclass
class Piece:
    """A part of a result while it is made."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
