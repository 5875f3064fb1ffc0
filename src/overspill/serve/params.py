"""The parameters of a request, and its results."""

import json
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overspill.core.errors import ConfigError

_LARGEST = sys.float_info.max
_MOST_PENALTY, _MOST_BIAS = 2, 100  # as in OpenAI's interface
_LONGEST_SCHEMA = 65_536  # characters
DECODER_FIELDS = ("src_lang", "tgt_lang", "decoder_prompt")
"""Fields of `SamplingParams` that only encoder-decoders have."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of the choice of tokens for one request, with the names of vLLM.

    `temperature=0` takes the likeliest token. `top_k=0` and `top_p=1` do not restrict the choice.
    With a `seed` a request gives the same tokens again, whatever runs beside it. `stop` ends the
    text before one of these strings. `logprobs=n` returns the logarithms of the probabilities of
    each token and of the n likeliest. `ignore_eos` goes on after the end of the text, and
    `min_tokens` does so until there are that many.

    `frequency_penalty` is subtracted from the logit of a token for each time that the answer has it
    already, `presence_penalty` once if it has it; `logit_bias` is added to the logits of token ids.
    `json_schema` (a dictionary, or its JSON text) makes the answer JSON of this schema;
    `{"type": "object"}` allows any object. `logprobs` are those of the model without all this.

    For encoder-decoders: `src_lang` and `tgt_lang` are the languages of the source and of the
    answer, as the tokenizer names them ("fra_Latn"); the decoder begins with the token of
    `tgt_lang`. It continues `decoder_prompt` (text or token ids), which is no part of the answer.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    json_schema: Mapping[str, Any] | str | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None
    decoder_prompt: str | Sequence[int] | None = None

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
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            _within(name, getattr(self, name), _MOST_PENALTY)
        _check_bias(self.logit_bias)
        for name in ("src_lang", "tgt_lang"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}={value!r} must be the name of a language")
        _check_decoder_prompt(self.decoder_prompt)
        if self.json_schema is not None:
            if self.min_tokens:
                raise ConfigError(
                    "min_tokens and json_schema exclude each other: JSON ends when it is complete"
                )
            self.schema_text()

    def schema_text(self) -> str:
        """Return `json_schema` as JSON text."""
        schema = self.json_schema
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = None
            if isinstance(parsed, Mapping):
                text = json.dumps(dict(parsed), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema is not JSON ({error}); give a JSON schema") from error
        if text is None:
            raise ConfigError(
                f"json_schema={reprlib.repr(schema)} must be a JSON schema: a dictionary, or the "
                "JSON text of one"
            )
        if len(text) > _LONGEST_SCHEMA:
            raise ConfigError(
                f"json_schema has {len(text)} characters; give one with at most {_LONGEST_SCHEMA}"
            )
        return text

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


def _within(name: str, value: object, most: float) -> None:
    if not _is_number(value) or not -most <= value <= most:  # type: ignore[operator]
        raise ConfigError(f"{name}={value!r} must be a number from -{most} to {most}")


def _check_bias(bias: object) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias={bias!r} must map token ids to numbers")
    for token, value in bias.items():
        _whole("a token id of logit_bias", token, 0)
        _within(f"logit_bias[{token}]", value, _MOST_BIAS)


def _check_decoder_prompt(prompt: object) -> None:
    if prompt is None or isinstance(prompt, str):
        return
    if not isinstance(prompt, list | tuple):
        raise ConfigError(f"decoder_prompt={prompt!r} must be a text or a list of token ids")
    for token in prompt:
        _whole("a token id of decoder_prompt", token, 0)


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens of a request."""

    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    """Tokens of the prompt whose keys and values were in the cache already."""


@dataclass
class Result:
    """Result of a request."""

    text: str
    token_ids: list[int]
    finish_reason: str
    """"stop" (the end of the text, or a stop string) or "length"."""
    prompt_tokens: int
    logprobs: list[dict[int, float]] | None = None
    """Log probabilities for each token: of the token itself and of the likeliest ones."""
    stop_reason: str | None = None
    """The stop string that ended the text, if one did."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the cache already."""

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, len(self.token_ids), self.cached_tokens)


@dataclass
class Piece:
    """Part of a result, delivered while the request is computed."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop", "length" or "error" in the last piece."""
    logprobs: list[dict[int, float]] | None = None
    """Log probabilities for each token of this piece, if they were asked for: of the token itself
    first, and of the likeliest ones."""
    stop_reason: str | None = None
    """The stop string that ended the text, if one did."""
